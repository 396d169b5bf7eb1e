#!/bin/sh
# Linters of cluster/: `make check-cluster`. $1 is the folder of their commands, $2 that of the project's.
set -eu
cd "$(dirname "$0")/.."

if [ "$1" = --tools ]; then
    for tool in systemd-analyze lintian dpkg-deb; do
        command -v "$tool" >/dev/null 2>&1 || {
            echo "rkserve: make check-cluster needs $tool: apt-get install systemd lintian dpkg" >&2
            exit 1
        }
    done
    exit
fi

tools=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# ansible-lint calls other commands of its environment.
PATH=$tools:$PATH
export NO_COLOR=1

step() {
    echo "== $1"
}

step "shellcheck"
# shellcheck disable=SC2046 # names of the repository have no spaces
shellcheck scripts/*.sh $(grep -rlE '^#!/bin/(ba)?sh' cluster --exclude-dir=offline --exclude=not_logged_in_yet)

step "yamllint"
yamllint --strict --config-file cluster/.yamllint cluster

step "ansible-lint"
(cd cluster/ansible && ansible-lint -q)

step "the collection, built and found by its name"
ansible-galaxy collection build -f --output-path "$scratch" cluster/ansible >/dev/null
ANSIBLE_COLLECTIONS_PATH=$scratch/installed ansible-galaxy collection install --offline -p "$scratch/installed" "$scratch"/rkserve-cluster-*.tar.gz >/dev/null
for playbook in cluster/ansible/playbooks/*.yml; do
    ANSIBLE_COLLECTIONS_PATH=$scratch/installed ansible-playbook -i cluster/ansible/inventory/example.yml --syntax-check \
        "rkserve.cluster.$(basename "$playbook" .yml)" >/dev/null
done

step "systemd-analyze verify"
mkdir "$scratch/units"
for unit in cluster/systemd/*.service; do
    # The program is not installed here.
    sed 's|/opt/rkserve/venv/bin/rkserve|/bin/true|' "$unit" >"$scratch/units/$(basename "$unit")"
done
systemd-analyze verify --man=no "$scratch"/units/*.service 2>&1 | grep rkserve && exit 1

step "lintian"
# The packages of a folder without wheels, and of one whose wheels are an empty archive.
"$2/python" -m scripts.offline "$scratch/offline" 2>/dev/null >&2
mkdir -p "$scratch/offline/wheels"
tar -cf "$scratch/offline/wheels/wheels-cp311-aarch64.tar" --files-from /dev/null
sh cluster/debian/build.sh "$scratch/offline" "$scratch/packages" >/dev/null
for package in "$scratch"/packages/*.deb; do
    lintian --fail-on error,warning --allow-root "$package"
done

step "hadolint"
hadolint cluster/container/Containerfile

step "KubeRay"
python scripts/check_kuberay.py ${KUBERAY_CRD:+"$KUBERAY_CRD"}

echo "cluster/ is clean."
