//! This process: its clock and its log, what it may do and what may be learnt from its memory, and what it asks of the
//! directory of users, which may be a server elsewhere that takes minutes to answer, or never does.
//!
//! The log is lines on standard error; under systemd, entries of the journal with fields.

use std::fs::File;
use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use caps::{CapSet, Capability, CapsHashSet};
use dibs_core::Time;
use nix::sys::prctl::set_dumpable;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::fstat;
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tracing_subscriber::fmt::format;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::data::priority::BOOST_NICE;

/// Fields whose names begin with it are for the journal: the sentence says the same. There `dibs.peer` is `DIBS_PEER`.
const FOR_THE_JOURNAL: &str = "dibs.";

/// Has what is logged from now on go where it belongs. `DIBS_LOG` says how much that is.
pub fn start_log() {
    let filter = EnvFilter::try_from_env("DIBS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let journal = leads_to_journal().then(tracing_journald::layer);
    let layer = match journal {
        Some(Ok(journal)) => journal.with_field_prefix(None).boxed(),
        // Without it, or where it cannot be reached, whoever reads standard error has all.
        _ => tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .fmt_fields(format::debug_fn(|writer, field, value| {
                match field.name() {
                    "message" => write!(writer, "{value:?}"),
                    name if name.starts_with(FOR_THE_JOURNAL) => Ok(()),
                    name => write!(writer, " {name}={value:?}"),
                }
            }))
            // It would print them, and whoever prints where nobody reads panics.
            .log_internal_errors(false)
            .boxed(),
    };
    tracing_subscriber::registry()
        .with(layer.with_filter(filter))
        .init();
}

/// Whether standard error leads to the journal: systemd says which file that is (systemd.exec(5), `JOURNAL_STREAM`).
fn leads_to_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    fstat(std::io::stderr()).is_ok_and(|file| stream == format!("{}:{}", file.st_dev, file.st_ino))
}

/// An event: its sentence, and for the journal its kind and what it is about.
pub(crate) fn log_event(kind: &str, text: &str, fields: &[(&str, String)]) {
    let of = |key: &str| {
        let field = fields.iter().find(|(name, _)| *name == key);
        field.map(|(_, value)| value.as_str())
    };
    tracing::info!(
        dibs.event = kind,
        dibs.peer = of("peer"),
        dibs.path = of("path"),
        dibs.bump = of("bump"),
        dibs.rule = of("rule"),
        dibs.connections = of("count"),
        "{text}"
    );
}

/// What was done; an error goes to the log.
pub(crate) fn or_warn<T>(done: Result<T, impl std::fmt::Display>) -> Option<T> {
    let warn = |error| tracing::warn!("{error:#}");
    done.map_err(warn).ok()
}

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

/// Time before the log first says what is waited for, and between two such words.
const SAY_AFTER: Duration = Duration::from_secs(2);
const SAY_EVERY: Duration = Duration::from_secs(10);
/// Time that systemd gives a start in addition, each time.
const EXTENSION: Duration = Duration::from_secs(30);

/// Runs what asks the directory away from the calling thread, and says so while that takes long.
///
/// # Errors
/// The lookup panicked.
pub(crate) async fn ask_directory<T: Send + 'static>(
    look_up: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    let mut asked = tokio::task::spawn_blocking(look_up);
    let (mut waited, mut patience) = (Duration::ZERO, SAY_AFTER);
    loop {
        match timeout(patience, &mut asked).await {
            Ok(answer) => {
                if !waited.is_zero() {
                    tracing::info!("the users that rules name are known now");
                    tell_systemd(&[NotifyState::Status("")]);
                }
                return answer.context("cannot look up the users of rules");
            }
            Err(_) => waited += patience,
        }
        patience = SAY_EVERY;
        let what = format!(
            "users that rules name could not be looked up for {} s: check that getent passwd USER answers \
             (/etc/nsswitch.conf)",
            waited.as_secs()
        );
        tracing::warn!("{what}");
        let extension = EXTENSION.as_micros() as u32;
        tell_systemd(&[
            NotifyState::Status(&what),
            NotifyState::ExtendTimeoutUsec(extension),
        ]);
    }
}

/// Tells systemd, if it is there.
fn tell_systemd(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}

/// By the clock that the node goes by.
pub(crate) fn now() -> Time {
    Time::from_nanos(dibs_io::boottime_ns())
}

/// When that is, for who sleeps until then.
pub(crate) fn instant(at: Time) -> tokio::time::Instant {
    tokio::time::Instant::now() + at.since(now())
}

/// Seconds since 1970.
pub(crate) fn wall() -> f64 {
    since_1970().as_secs_f64()
}

/// By the host's clock.
pub(crate) fn since_1970() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// A time of day that does not go back, whatever becomes of the host's clock: peers refuse a call that is older
/// than an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MonotonicWall {
    /// Milliseconds since 1970.
    wall: u64,
    /// Milliseconds since the host started, then.
    uptime: u64,
}

impl MonotonicWall {
    /// What the clock says, or where it would be if it had gone on from `before`, whichever is later. After
    /// the host has started anew nobody knows how long it was off.
    fn now(wall: Duration, uptime: Duration, before: Option<Self>) -> Self {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (wall, uptime) = (millis(wall), millis(uptime));
        let at_least = before.map_or(0, |before| {
            let since = uptime.saturating_sub(before.uptime);
            before.wall.saturating_add(since)
        });
        let wall = wall.max(at_least);
        Self { wall, uptime }
    }

    /// What the host's clocks say by now.
    pub(crate) fn after_last(before: Option<Self>) -> Self {
        let uptime = Duration::from_nanos(dibs_io::boottime_ns());
        Self::now(since_1970(), uptime, before)
    }

    /// Later than any moment that this stands for.
    pub(crate) fn after(self) -> Duration {
        Duration::from_millis(self.wall.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_calls_does_not_go_back() {
        let at = |wall, uptime, before| {
            MonotonicWall::now(
                Duration::from_secs(wall),
                Duration::from_secs(uptime),
                before,
            )
        };
        let first = at(1000, 10, None);
        assert_eq!(first.after(), Duration::from_millis(1_000_001));
        // Set back by an hour while nobody looked.
        let second = at(500, 30, Some(first));
        assert_eq!(second, at(1020, 30, None));
        // Another start of the host.
        assert_eq!(at(400, 5, Some(second)), at(1020, 5, None));
        assert_eq!(at(2000, 40, Some(second)), at(2000, 40, None));
    }
}
