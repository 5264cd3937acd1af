//! What the backstop is told: which connections are on bumps, by choice or because they follow.

use dibs_config::{Fail, Level};
use dibs_control::{BackstopInfo, BackstopState, RuleOrigin};
use dibs_policy::conntrack::Connection;
use dibs_policy::{Backstop, BumpId, Desired, Ends, Error, Known, Place, Standing, Strength};
use nix::libc;

use crate::daemon::{Daemon, State};
use crate::rules::Rule;
use crate::terms::{ends, marks, policy_ends};
use crate::wakers::Task;
use dibs_switch::conns::Pair;

fn info(standing: &Standing) -> BackstopInfo {
    let (state, reason) = match standing {
        Standing::Idle => (BackstopState::Idle, None),
        Standing::Stands(Strength::Lasting) => (BackstopState::Lasting, None),
        Standing::Stands(Strength::WhileRunning) => (BackstopState::WhileRunning, None),
        Standing::Stands(Strength::Shared) => (BackstopState::Shared, None),
        Standing::Missing => {
            let why = Error::NoNftables.to_string();
            (BackstopState::Missing, Some(why))
        }
        Standing::Failed(why) => (BackstopState::Failed, Some(why.clone())),
    };
    BackstopInfo { state, reason }
}

impl State {
    /// The connections that the backstop knows by name.
    pub(crate) fn known(&self) -> Known {
        let mut known = Known::default();
        for (pair, conn) in self.conns.iter() {
            let chosen = conn.choice.get().filter(|choice| !choice.pending);
            match chosen.map(|choice| choice.bump).or(conn.followed()) {
                Some(0) => known.plain.insert(policy_ends(pair)),
                Some(_) => known.bumped.insert(policy_ends(pair)),
                None => false,
            };
        }
        known
    }
}

impl Daemon {
    /// Brings the backstop to `wish`; whether others had undone it. Steering works without it, so where that
    /// fails it is told and tried again.
    pub(crate) async fn set_backstop(&self, wish: &Desired) -> bool {
        let mut backstop = self.backstop.lock().await;
        let known = Known {
            locked: self.locked_passing(),
            ..self.state.borrow().known()
        };
        let before = backstop.standing().clone();
        let set = backstop.set(wish, &known).await;
        self.tell_standing(&before, backstop.standing());
        match (set, backstop.standing()) {
            (Ok(undone), _) => undone,
            (Err(error), Standing::Idle) => {
                self.events.note("clear nftables", Err(error));
                false
            }
            (Err(_), _) => false,
        }
    }

    /// Tells whether the backstop stands, if that is news.
    pub(crate) fn tell_standing(&self, before: &Standing, now: &Standing) {
        if before == now {
            return;
        }
        const KIND: &str = "backstop";
        const PLAIN: &str = "what others flush may let connections go on in plain";
        let state = info(now).state;
        let announce = |text| {
            self.events
                .announce(KIND, text, &[("state", state.to_string())])
        };
        match now {
            Standing::Idle => {}
            Standing::Stands(strength) => {
                let text = format!("the table of nftables {strength}");
                tracing::info!(dibs.event = KIND, "{text}");
                announce(text);
            }
            Standing::Missing => {
                let text = format!("{}: {PLAIN}", Error::NoNftables);
                tracing::warn!(dibs.event = KIND, "{text}");
                announce(text);
            }
            Standing::Failed(why) => {
                let text = format!("{why}: {PLAIN}");
                tracing::error!(dibs.event = KIND, "{text}");
                announce(text);
                self.wakers.wake(Task::Repair);
            }
        }
    }

    /// For the user.
    pub(crate) async fn backstop_info(&self) -> BackstopInfo {
        info(self.backstop.lock().await.standing())
    }

    /// Whether the kernel refused the backstop, so that it is to be tried again.
    pub(crate) async fn lacks_backstop(&self) -> bool {
        matches!(self.backstop.lock().await.standing(), Standing::Failed(_))
    }

    /// Why the kernel would not take the backstop of all that is wanted and of a rule more, if so. Where
    /// steering fails open, nothing is backed; where there is no nftables, nothing can be, which `status` says.
    pub(crate) async fn unbacked(&self, added: Option<&Rule>) -> Option<String> {
        if self.config.daemon.fail == Fail::Open {
            return None;
        }
        let wish = self.state.borrow().wish_with(&self.config, added);
        match self.backstop.lock().await.check(&wish).await {
            Ok(()) | Err(Error::NoNftables) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    /// To be called before the kernel is brought to what is wanted.
    ///
    /// # Errors
    /// A rule of the file requires its bump, and the kernel would not take what is to hold it when others
    /// flush the firewall.
    pub(crate) async fn ensure_backed(&self) -> anyhow::Result<()> {
        let required = {
            let state = self.state.borrow();
            let is_required =
                |rule: &&Rule| rule.origin == RuleOrigin::Config && rule.level == Level::Require;
            state.rules.iter().find(is_required).map(|rule| rule.id)
        };
        let Some(id) = required else { return Ok(()) };
        match self.unbacked(None).await {
            None => Ok(()),
            Some(why) => Err(self
                .config
                .refuse(
                    &format!("rule.{}.require", id - 1),
                    format!("rule {id} would not be held when others flush the firewall: {why}"),
                    None,
                )
                .into()),
        }
    }

    /// Tells the backstop where connections are; its caller holds it while the marks change too.
    pub(crate) async fn note_places(&self, backstop: &mut Backstop, places: &[(Pair, Place)]) {
        let places: Vec<(Ends, Place)> = {
            let conns = &self.state.borrow().conns;
            let decided = |(pair, place): &&(Pair, Place)| {
                *place != Place::Elsewhere || conns.get(pair).choice.get().is_none()
            };
            let known = places.iter().filter(decided);
            known
                .map(|(pair, place)| (policy_ends(pair), *place))
                .collect()
        };
        let before = backstop.standing().clone();
        // What failed shows in how it stands now, and is tried again.
        let _ = backstop.note(&places).await;
        self.tell_standing(&before, backstop.standing());
    }

    /// Notes where the kernel has put a connection, by rules here or because the peer began it.
    pub(crate) async fn note_followed(&self, entry: &Connection) {
        let Some(pair) = self.ours(entry) else { return };
        let mut backstop = self.backstop.lock().await;
        let bump = marks(&self.config).bump_of(entry.mark).map(BumpId::get);
        let (was, chosen) = self.update(&pair, |conn| {
            (conn.handle_followed(bump), conn.choice.get().is_some())
        });
        let place = match (bump, was) {
            (Some(_), None) => Place::Bumped,
            (None, Some(_)) => Place::Elsewhere,
            _ => return,
        };
        if !chosen {
            self.note_places(&mut backstop, &[(pair, place)]).await;
        }
    }

    /// A connection that followed has ended.
    pub(crate) async fn forget_followed(&self, pair: &Pair) {
        let mut backstop = self.backstop.lock().await;
        self.update(pair, |conn| conn.handle_followed(None));
        let place = (*pair, Place::Elsewhere);
        self.note_places(&mut backstop, &[place]).await;
    }

    /// Looks for connections that follow: an earlier daemon's, or those of which no event told.
    pub(crate) async fn find_followed(&self) -> Result<(), dibs_policy::Error> {
        for entry in self.conntrack()?.list(Some).await? {
            self.note_followed(&entry).await;
        }
        Ok(())
    }

    /// A TCP connection of this host, or of a host behind it, to a host behind a peer, as it sends.
    fn ours(&self, entry: &Connection) -> Option<Pair> {
        if i32::from(entry.original.protocol) != libc::IPPROTO_TCP {
            return None;
        }
        let state = self.state.borrow();
        let is_ours = |pair: &Pair| {
            state.addresses.contains(&pair.local.ip()) && self.peer_of(pair.remote.ip()).is_some()
        };
        let is_ours = |pair: &Pair| is_ours(pair) || self.passes(pair);
        ends(entry).into_iter().find(is_ours)
    }

    /// What the backstop dropped.
    pub(crate) async fn plain_dropped(&self) -> u64 {
        let dropped = self.backstop.lock().await.dropped().await;
        dropped.unwrap_or_else(|error| {
            tracing::debug!("{error}");
            0
        })
    }
}
