# What the trials of the package have in common: packaging/deb/try.sh, and packaging/systemd/try.sh.

say() { echo "== $*"; }
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Waits for what a command says, by asking it again and again; gives up after five minutes.
await() {
    local what=$1 until=$((SECONDS + 300))
    shift
    until "$@"; do
        [ $SECONDS -lt $until ] || fail "waited in vain for $what"
        sleep 0.2
    done
}
