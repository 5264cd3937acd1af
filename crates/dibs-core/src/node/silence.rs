//! Calls that the local kernel does not answer, or refuses: a SYN of the peer went into the TUN, and nothing came out, or RST.
//!
//! A kernel answers each SYN at once: with SYN and ACK, or with RST where nobody listens. Only a firewall keeps it
//! silent, or a listener whose queue is full, which the owner can see. The TUN is a device of its own for the
//! firewall, so a rule for the interface of a path does not let in what comes out of it, and nobody else would notice.
//! Nor would anybody notice that the port is another one here: a router before this host leads it there in plain, or a
//! nat rule for the interface of a path does.

use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::SeqNumber;

use crate::time::Time;

/// A SYN that is repeated so long after it first came got no answer in the meantime. Linux repeats it after a second;
/// a path may bring the first one late.
const PATIENCE: Duration = Duration::from_millis(900);
/// A port that nobody calls in vain for so long is forgotten.
const FORGET: Duration = Duration::from_secs(15 * 60);
/// Ports of a peer that are kept, at most: a message names them all. More are counted only.
pub const MAX_SILENT: usize = 32;
/// Ports of them that refuse, at most: they give way to those that are silent.
const MAX_REFUSING: usize = 8;

/// A port of this host whose kernel does not answer what a peer sends there by a bump, or refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SilentPort {
    /// The bump that the calls came by.
    pub bump: BumpId,
    /// The port of this host.
    pub port: u16,
    /// Connections that were called in vain since it fell silent.
    pub calls: u64,
    /// The kernel answers with RST.
    pub refuses: bool,
}

/// A SYN that the local kernel has not answered yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    since: Time,
    seq: SeqNumber,
    bump: BumpId,
    counted: bool,
}

/// The meaning of a SYN that goes to the local kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// The kernel may still answer.
    Early,
    /// The kernel let one before it go unanswered.
    Unanswered {
        /// That was not known of this connection.
        first: bool,
    },
}

/// Notes a SYN, and the bump that it came by, of a connection of which `call` was known.
pub(super) fn hear(call: &mut Option<Call>, now: Time, bump: BumpId, seq: SeqNumber) -> Heard {
    match call {
        Some(known) if (known.bump, known.seq) == (bump, seq) => {
            match now.since(known.since) >= PATIENCE {
                true => known.fail(),
                false => Heard::Early,
            }
        }
        _ => {
            *call = Some(Call {
                since: now,
                seq,
                bump,
                counted: false,
            });
            Heard::Early
        }
    }
}

impl Call {
    /// The bump that it came by.
    pub(super) const fn bump(&self) -> BumpId {
        self.bump
    }

    /// Notes that the call gets no answer.
    pub(super) fn fail(&mut self) -> Heard {
        let first = !std::mem::replace(&mut self.counted, true);
        Heard::Unanswered { first }
    }
}

struct Entry {
    port: SilentPort,
    last: Time,
}

/// The ports that do not answer a peer. Inputs are [`note`](Self::note), [`answered`](Self::answered) and
/// [`expire`](Self::expire); the output is [`poll_change`](Self::poll_change).
#[derive(Default)]
pub(super) struct SilentPorts {
    entries: Vec<Entry>,
    changed: bool,
}

impl SilentPorts {
    /// A call got no answer, the first one of its connection or a later one; false if there is no room for its port.
    pub(super) fn note(&mut self, now: Time, at: (BumpId, u16), first: bool) -> bool {
        if self.entries.len() == MAX_SILENT {
            let refusing = { self.entries.iter() }.position(|entry| entry.port.refuses);
            refusing.map(|entry| self.entries.remove(entry));
        }
        self.put(now, at, (first, false))
    }

    /// The kernel answered a call with RST.
    pub(super) fn refused(&mut self, now: Time, at: (BumpId, u16)) {
        let refusing = { self.entries.iter() }.filter(|entry| entry.port.refuses);
        if refusing.count() < MAX_REFUSING || self.find(at).is_some() {
            self.put(now, at, (true, true));
        }
    }

    fn put(&mut self, now: Time, at: (BumpId, u16), (first, refuses): (bool, bool)) -> bool {
        let calls = u64::from(first);
        if let Some(entry) = self.find(at) {
            entry.port.calls += calls;
            entry.last = now;
            self.changed |= std::mem::replace(&mut entry.port.refuses, refuses) != refuses;
            return true;
        }
        let has_room = self.entries.len() < MAX_SILENT;
        if has_room {
            let port = SilentPort {
                bump: at.0,
                port: at.1,
                calls,
                refuses,
            };
            self.entries.push(Entry { port, last: now });
            self.changed = true;
        }
        has_room
    }

    /// The kernel answers at this port after all.
    pub(super) fn answered(&mut self, bump: BumpId, port: u16) {
        let answers = |entry: &Entry| (entry.port.bump, entry.port.port) == (bump, port);
        self.forget(answers);
    }

    /// Forgets what is old.
    pub(super) fn expire(&mut self, now: Time) {
        self.forget(|entry| now.since(entry.last) >= FORGET);
    }

    /// All of them.
    pub(super) fn ports(&self) -> Vec<SilentPort> {
        self.entries.iter().map(|entry| entry.port).collect()
    }

    /// All of them, if others are silent than at the last time.
    pub(super) fn poll_change(&mut self) -> Option<Vec<SilentPort>> {
        std::mem::take(&mut self.changed).then(|| self.ports())
    }

    fn find(&mut self, at: (BumpId, u16)) -> Option<&mut Entry> {
        let mut entries = self.entries.iter_mut();
        entries.find(|entry| (entry.port.bump, entry.port.port) == at)
    }

    fn forget(&mut self, which: impl Fn(&Entry) -> bool) {
        let before = self.entries.len();
        self.entries.retain(|entry| !which(entry));
        self.changed |= self.entries.len() < before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bump::{SCRAMBLE, SEAL};

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn only_a_repetition_a_second_later_shows_that_nobody_answers() {
        let mut call = None;
        let mut hear = |now, seq| hear(&mut call, now, SEAL, seq);
        let [one, other] = [7, 8].map(SeqNumber::new);
        assert_eq!(hear(at(0), one), Heard::Early);
        // Another path brings it again.
        assert_eq!(hear(at(20), one), Heard::Early);
        assert_eq!(hear(at(990), one), Heard::Unanswered { first: true });
        assert_eq!(hear(at(3000), one), Heard::Unanswered { first: false });
        // Another connection of the same ports has to be repeated too.
        assert_eq!(hear(at(9000), other), Heard::Early);
        assert_eq!(hear(at(10_000), other), Heard::Unanswered { first: true });
    }

    #[test]
    fn ports_are_told_when_they_fall_silent_and_when_they_answer() {
        let mut silent = SilentPorts::default();
        assert_eq!(silent.poll_change(), None);
        assert!(silent.note(at(0), (SEAL, 22), true));
        assert!(silent.note(at(2000), (SEAL, 22), false));
        assert!(silent.note(at(2000), (SEAL, 22), true));
        let expected = SilentPort {
            bump: SEAL,
            port: 22,
            calls: 2,
            refuses: false,
        };
        assert_eq!(silent.poll_change(), Some(vec![expected]));
        assert_eq!(silent.poll_change(), None);
        silent.answered(SEAL, 23);
        silent.answered(SCRAMBLE, 22);
        assert_eq!(silent.poll_change(), None);
        silent.answered(SEAL, 22);
        assert_eq!(silent.poll_change(), Some(vec![]));
    }

    #[test]
    fn a_port_that_nobody_calls_is_forgotten_and_there_are_few() {
        let mut silent = SilentPorts::default();
        let most = MAX_SILENT as u16;
        for port in 0..most {
            assert!(silent.note(at(u64::from(port)), (SEAL, port), true));
        }
        assert!(!silent.note(at(50), (SEAL, most), true));
        assert_eq!(silent.ports().len(), MAX_SILENT);
        silent.expire(at(10) + FORGET);
        let first = silent.ports()[0];
        assert_eq!((first.port, silent.ports().len()), (11, MAX_SILENT - 11));
        assert!(silent.note(at(50) + FORGET, (SEAL, most), true));
    }

    #[test]
    fn ports_that_refuse_are_fewer_and_give_way() {
        let mut silent = SilentPorts::default();
        let most = MAX_SILENT as u16;
        for port in 0..most {
            silent.refused(at(0), (SEAL, port));
        }
        assert!(silent.ports().iter().all(|port| port.refuses));
        assert_eq!(silent.ports().len(), MAX_REFUSING);
        for port in 100..100 + most {
            assert!(silent.note(at(0), (SEAL, port), true));
        }
        assert!(silent.ports().iter().all(|port| !port.refuses));
        assert_eq!(silent.ports().len(), MAX_SILENT);
        // One that is silent for a firewall refuses without it.
        silent.poll_change();
        silent.refused(at(0), (SEAL, 100));
        let changed = silent.poll_change().expect("it is another fault");
        assert!(changed[0].refuses && changed[0].calls == 2, "{changed:?}");
        silent.refused(at(0), (SEAL, 100));
        assert_eq!(silent.poll_change(), None);
    }
}
