#!/bin/sh
# The Secrets with the certificates of the job @{name}, by an authority of your own, for clusters without cert-manager:
#
#     sh secrets.sh FOLDER                                        before `kubectl apply -k`
#     KUBECTL="kubectl --namespace training" sh secrets.sh FOLDER      in another namespace
#
# The authority and all keys are kept in FOLDER, which is made for you alone if it is not there: protect it. Run it again
# before 30 days are over; the pods take the new certificates up without a restart.
set -eu
folder=${1:?usage: sh secrets.sh FOLDER, which has or gets the authority and the keys}
mkdir -p -m 700 -- "$folder"
cd -- "$folder"
test -e ca/ca.pem || parashard certs init ca --valid-days 3650

secret() {
  role=$1
  shift
  parashard certs issue ca "tls/$role" --role "$role" --name @{name} "$@"
  ${KUBECTL:-kubectl} create secret generic "@{name}-$role-tls" --dry-run=client --output=yaml \
    --from-file=ca.crt="tls/$role/ca.pem" \
    --from-file=tls.crt="tls/$role/cert.pem" \
    --from-file=tls.key="tls/$role/key.pem" | ${KUBECTL:-kubectl} apply --server-side --filename=-
}

# The names that others connect to them by, as StatefulSets and as a JobSet.
secret coordinator \
  @{coordinator_host_flags}
  --valid-days 30
secret shard \
  @{shard_host_flags}
  --valid-days 30
secret worker --valid-days 30
secret operator --valid-days 30
