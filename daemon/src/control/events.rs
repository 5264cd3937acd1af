//! What happens is told to the log and to those who follow the events, as far as it concerns them.

use std::cell::RefCell;
use std::collections::BTreeMap;

use dibs_control::Event;
use tokio::sync::broadcast;

use crate::control::{Caller, ROOT};
use crate::host::clock::wall;
use crate::host::log;

/// Events that wait for a slow follower.
const EVENTS: usize = 256;

/// Whom an event concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// All who may follow.
    All,
    /// Root.
    Root,
    /// Root, and this user.
    User(u32),
    /// This user; root knows.
    UserAlone(u32),
}

impl Audience {
    /// Of what concerns connections of this owner; none: it only passes this host.
    pub(crate) fn of(uid: Option<u32>) -> Self {
        match uid {
            Some(uid) if uid != ROOT => Self::User(uid),
            _ => Self::Root,
        }
    }

    fn includes(self, caller: Caller) -> bool {
        match self {
            Self::All => true,
            Self::Root => caller.is_root(),
            Self::User(uid) => caller.is_root() || caller.uid == uid,
            Self::UserAlone(uid) => caller.uid == uid,
        }
    }
}

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
        log::event(kind, &text, fields);
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
