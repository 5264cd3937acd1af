//! What the daemon may do, and what may be learnt from its memory.

use std::fs::File;

use anyhow::Context as _;
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl::set_dumpable;
use nix::sys::resource::{Resource, setrlimit};

use crate::data::priority::BOOST_NICE;

/// TUN, routes, rules, marks; iptables and binding to an interface; whose a socket is.
const NEEDED: [Capability; 4] = [
    Capability::CAP_NET_ADMIN,
    Capability::CAP_NET_RAW,
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_DAC_READ_SEARCH,
];

/// More than a daemon with two paths has open once it has started, programs that it runs included.
const DESCRIPTORS: usize = 64;

/// RLIMIT_NICE counts from 20 downward.
const NICEST: u64 = (20 - BOOST_NICE) as u64;

/// Refuses where too few files can be opened: the runtime panics if it gets none.
pub(crate) fn ensure_descriptors() -> anyhow::Result<()> {
    let opened: std::io::Result<Vec<File>> = { 0..DESCRIPTORS }
        .map(|_| File::open("/dev/null"))
        .collect();
    opened.map(drop).with_context(|| {
        format!(
            "cannot have {DESCRIPTORS} files open at once; raise the limit (ulimit -n, LimitNOFILE= of \
             systemd)"
        )
    })
}

/// Gives up every capability that steering does not need, for this process and the programs that it
/// runs, and keeps keys out of core dumps. What is needed to listen at these ports is kept, because an interface may
/// come at any time. To be called before there is a second thread.
pub(crate) fn restrict(ports: impl IntoIterator<Item = u16>) -> anyhow::Result<()> {
    // The data path may go before others, and says so itself where it may not.
    let is_allowed = setrlimit(Resource::RLIMIT_NICE, NICEST, NICEST).is_ok();
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("cannot forbid core dumps")?;
    // The limit does not hold where a program takes the dumps.
    set_dumpable(false).context("cannot forbid core dumps")?;
    let mut needed: CapsHashSet = NEEDED.into_iter().collect();
    if !is_allowed {
        needed.insert(Capability::CAP_SYS_NICE);
    }
    let first_free = first_unprivileged_port();
    if { ports.into_iter() }.any(|port| u32::from(port) < first_free) {
        needed.insert(Capability::CAP_NET_BIND_SERVICE);
    }
    let keep = |set: CapSet| -> anyhow::Result<CapsHashSet> {
        let held = caps::read(None, set).context("cannot read capabilities")?;
        Ok(held.intersection(&needed).copied().collect())
    };
    // First, for it takes CAP_SETPCAP; it is what programs run as root get back.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).unwrap_or(false) {
        for capability in caps::read(None, CapSet::Bounding)
            .context("cannot read capabilities")?
            .difference(&needed)
        {
            caps::drop(None, CapSet::Bounding, *capability)
                .with_context(|| format!("cannot give up {capability}"))?;
        }
    }
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        caps::set(None, set, &keep(set)?).context("cannot give up capabilities")?;
    }
    Ok(())
}

/// The lowest port of this network namespace that takes no capability to listen at (ip(7)).
fn first_unprivileged_port() -> u32 {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let port = text.ok().and_then(|text| text.trim().parse().ok());
    port.unwrap_or(1024)
}
