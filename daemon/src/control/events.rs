//! What happens is told to the log and to those who follow the events, as far as it concerns them. Warnings that a peer can
//! cause as often as it likes, with each message, go to the log at a bounded rate.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use dibs_control::Event;
use dibs_core::Time;
use tokio::sync::broadcast;

use crate::control::{Audience, Caller, ROOT};
use crate::host::process;
use crate::host::process::wall;

/// Events that wait for a slow follower.
const EVENTS: usize = 256;

/// An event, and whom it concerns.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    audience: Audience,
    event: Event,
}

impl Told {
    /// What this follower is to hear of it.
    pub(crate) fn to(self, caller: Caller) -> Option<Event> {
        self.audience.includes(caller).then_some(self.event)
    }
}

/// Tells what happens. Commands are `tell*`, [`announce`](Self::announce), [`note`](Self::note) and
/// [`warn_while`](Self::warn_while); what comes out is the log, and what [`follow`](Self::follow) returns.
pub(crate) struct Events {
    followers: broadcast::Sender<Told>,
    /// What is wrong, by what it is about.
    faults: RefCell<BTreeMap<&'static str, Vec<String>>>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            followers: broadcast::channel(EVENTS).0,
            faults: RefCell::default(),
        }
    }
}

impl Events {
    /// Tells all who follow, and the log.
    pub(crate) fn tell(&self, kind: &str, text: String, fields: &[(&str, String)]) {
        self.tell_of(Audience::All, kind, text, fields);
    }

    /// Tells those whom it concerns, and the log.
    pub(crate) fn tell_of(
        &self,
        audience: Audience,
        kind: &str,
        text: String,
        fields: &[(&str, String)],
    ) {
        process::log_event(kind, &text, fields);
        self.send(audience, kind, text, fields);
    }

    /// Tells of connections with these owners, root and the log of all, members of the group of their own; and
    /// how many, which `text` is made of.
    pub(crate) fn tell_of_conns(
        &self,
        uids: impl Iterator<Item = Option<u32>>,
        kind: &str,
        text: impl Fn(usize) -> String,
        fields: &[(&str, String)],
    ) {
        let (mut all, mut own) = (0, BTreeMap::<u32, usize>::new());
        for uid in uids {
            all += 1;
            if let Some(uid) = uid.filter(|uid| *uid != ROOT) {
                *own.entry(uid).or_default() += 1;
            }
        }
        if all == 0 {
            return;
        }
        let counted = |count: usize| [fields, &[("count", count.to_string())]].concat();
        self.tell_of(Audience::Root, kind, text(all), &counted(all));
        for (uid, count) in own {
            let audience = Audience::UserAlone(uid);
            self.send(audience, kind, text(count), &counted(count));
        }
    }

    /// Tells all who follow; whoever calls has told the log.
    pub(crate) fn announce(&self, kind: &str, text: String, fields: &[(&str, String)]) {
        self.send(Audience::All, kind, text, fields);
    }

    fn send(&self, audience: Audience, kind: &str, text: String, fields: &[(&str, String)]) {
        let event = Event {
            time: wall(),
            kind: kind.to_owned(),
            text,
            fields: fields
                .iter()
                .map(|(key, value)| ((*key).to_owned(), value.clone()))
                .collect(),
        };
        // Nobody may be following.
        let _ = self.followers.send(Told { audience, event });
    }

    /// Events from now on.
    pub(crate) fn follow(&self) -> broadcast::Receiver<Told> {
        self.followers.subscribe()
    }

    /// Logs why something that is tried again and again failed, unless that is known.
    pub(crate) fn note(&self, what: &'static str, done: Result<(), impl Into<anyhow::Error>>) {
        let fault = done
            .err()
            .map(|error| format!("cannot {what}: {:#}", error.into()));
        self.warn_while(what, fault.into_iter().collect());
    }

    /// Warns of what is wrong with something now, once of each fault as long as it lasts.
    pub(crate) fn warn_while(&self, what: &'static str, faults: Vec<String>) {
        let mut known = self.faults.borrow_mut();
        let known = known.entry(what).or_default();
        let news = faults.iter().filter(|fault| !known.contains(fault));
        news.for_each(|fault| tracing::warn!("{fault}"));
        *known = faults;
    }
}

/// Warnings of a peer that are logged at once.
const BURST: u32 = 10;
/// One more is logged each.
const EACH: Duration = Duration::from_secs(30);

/// Logs what peers cause. Warnings beyond a rate of each peer are counted only.
#[derive(Default)]
pub(crate) struct PeerWarnings {
    peers: RefCell<Vec<Bucket>>,
    left_out: Cell<u64>,
}

/// Warnings that one peer may still cause.
#[derive(Clone, Copy, Default)]
struct Bucket {
    /// When all of the burst may be logged again.
    full: Time,
    /// Left out since the last one that was logged.
    left_out: u64,
}

impl PeerWarnings {
    /// Warns of something that peer number `peer`, of this name, caused.
    pub(crate) fn warn(&self, now: Time, (peer, name): (usize, &str), text: &str) {
        match self.admit(now, peer) {
            Some(0) => tracing::warn!(dibs.peer = name, "peer {name}: {text}"),
            Some(more) => tracing::warn!(
                dibs.peer = name,
                "peer {name}: {text} ({more} warnings before were left out)"
            ),
            None => self.left_out.update(|count| count + 1),
        }
    }

    /// True if another one is logged, and how many were left out before it.
    fn admit(&self, now: Time, peer: usize) -> Option<u64> {
        let mut peers = self.peers.borrow_mut();
        if peers.len() <= peer {
            peers.resize(peer + 1, Bucket::default());
        }
        let bucket = &mut peers[peer];
        if bucket.full.since(now) > EACH * (BURST - 1) {
            bucket.left_out += 1;
            return None;
        }
        bucket.full = bucket.full.max(now) + EACH;
        Some(std::mem::take(&mut bucket.left_out))
    }

    /// For `status`, by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 1] {
        [("peer_warnings_left_out", self.left_out.get())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_warns_of_itself_at_a_rate_and_hides_no_other() {
        let warnings = PeerWarnings::default();
        let start = Time::ZERO + Duration::from_secs(1000);
        let admitted = |now, peer| warnings.admit(now, peer);
        for _ in 0..BURST {
            assert_eq!(admitted(start, 1), Some(0));
        }
        for _ in 0..50 {
            assert_eq!(admitted(start, 1), None);
            warnings.warn(start, (1, "b"), "it repeats itself");
        }
        assert_eq!(admitted(start, 0), Some(0), "another peer's");
        assert_eq!(admitted(start + EACH, 1), Some(100));
        assert_eq!(admitted(start + EACH, 1), None);
        let later = start + EACH * (2 * BURST);
        let logged = (0..100).filter(|_| admitted(later, 1).is_some());
        assert_eq!(logged.count(), BURST as usize);
        assert_eq!(warnings.counters(), [("peer_warnings_left_out", 50)]);
    }
}
