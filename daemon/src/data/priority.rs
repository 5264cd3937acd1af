//! The data path's part of the processors.
//!
//! The kernel runs its network before programs; this thread is one of many. What the others send while it waits for its
//! turn is lost in the TUN's ring. So it goes before others while it waits for a processor about as long as it runs, unless
//! whoever started the daemon chose a niceness. Beside one program that sends it waits a third of that, and then a stream
//! is faster without (docs/performance.md).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use dibs_core::Time;
use dibs_io::{niceness, set_niceness};

/// Niceness while it does.
pub(crate) const BOOST_NICE: i32 = -15;
/// How often it is looked at, while there is something to do.
const SPACING: Duration = Duration::from_millis(250);
/// Looks in a row that find it so: what begins or ends is busy for a moment.
const LOOKS: u32 = 3;
/// How long it goes before others at least.
const HOLD: Duration = Duration::from_secs(30);

/// What the scheduler did to this thread.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    ran: Duration,
    /// It could have run, and others did.
    waited: Duration,
}

/// Belongs to the thread that it was made in.
pub(super) struct Priority {
    /// `/proc/thread-self/schedstat`.
    stat: File,
    looked: Time,
    before: Spent,
    /// Looks in a row that found it to starve.
    starved: u32,
    /// When it may stop going before others, if it does.
    until: Option<Time>,
    /// The system refused it, or whoever started the daemon chose a niceness.
    refused: bool,
    /// How often it began to.
    pub(super) taken: u64,
}

impl Priority {
    /// Of the calling thread.
    pub(super) fn new(now: Time) -> io::Result<Self> {
        let stat = File::open("/proc/thread-self/schedstat")?;
        let before = read(&stat)?;
        Ok(Self {
            stat,
            looked: now,
            before,
            starved: 0,
            until: None,
            refused: niceness() != 0,
            taken: 0,
        })
    }

    /// To be called in each round.
    pub(super) fn look(&mut self, now: Time) {
        let span = now.since(self.looked);
        if span < SPACING || self.refused {
            return;
        }
        self.looked = now;
        let Ok(spent) = read(&self.stat) else {
            self.refused = true;
            return;
        };
        self.starved = match is_starved(span, self.before, spent) {
            true => self.starved + 1,
            false => 0,
        };
        self.before = spent;
        let starves = self.starved >= LOOKS;
        match self.until {
            None if starves => match set_both(BOOST_NICE) {
                Ok(()) => {
                    self.taken += 1;
                    self.until = Some(now + HOLD);
                }
                Err(error) => {
                    self.refused = true;
                    tracing::warn!(
                        "other programs keep the processors busy, and dibsd cannot raise its priority ({error}): packets \
                         will be lost; give the host more processor time"
                    );
                }
            },
            Some(_) if starves => self.until = Some(now + HOLD),
            Some(until) if until <= now => {
                // Anybody may be nicer than before.
                let _ = set_both(0);
                self.until = None;
            }
            _ => {}
        }
    }
}

/// Sets the niceness of this thread, and of the main one, for itself and for the programs that it starts: beside this thread
/// iptables would not come to its end on a busy host.
fn set_both(nice: i32) -> io::Result<()> {
    let main = std::process::id();
    set_niceness(0, nice)?;
    set_niceness(main, nice)
}

/// Others had the processor about as long as it had, and it wanted much.
fn is_starved(span: Duration, before: Spent, now: Spent) -> bool {
    let ran = now.ran.saturating_sub(before.ran);
    let waited = now.waited.saturating_sub(before.waited);
    waited > ran * 3 / 4 && waited > span / 4
}

/// Nanoseconds on a processor, nanoseconds in a run queue, number of turns.
fn read(stat: &File) -> io::Result<Spent> {
    let mut line = [0; 80];
    let len = stat.read_at(&mut line, 0)?;
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let line = std::str::from_utf8(&line[..len]).map_err(|_| malformed())?;
    let mut fields = line.split_ascii_whitespace().map(str::parse);
    let mut next = || match fields.next() {
        Some(Ok(nanos)) => Ok(Duration::from_nanos(nanos)),
        _ => Err(malformed()),
    };
    Ok(Spent {
        ran: next()?,
        waited: next()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_as_long_as_it_runs_starves() {
        let spent = |ran, waited| Spent {
            ran: Duration::from_millis(ran),
            waited: Duration::from_millis(waited),
        };
        let starves = |ran: u64, waited: u64| {
            is_starved(
                Duration::from_millis(250),
                spent(1000, 500),
                spent(1000 + ran, 500 + waited),
            )
        };
        assert!(starves(20, 230));
        assert!(starves(120, 130));
        assert!(!starves(170, 70), "beside one program that sends");
        assert!(!starves(5, 40), "it hardly wants any");
    }

    #[test]
    fn the_kernel_tells_what_it_did() {
        let stat = File::open("/proc/thread-self/schedstat").unwrap();
        let before = read(&stat).unwrap();
        let mut turns = 0u64;
        while read(&stat).unwrap().ran == before.ran {
            turns += 1;
            assert!(turns < 1 << 30, "it runs");
        }
    }
}
