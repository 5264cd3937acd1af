//! Moving live connections: what users here choose, what peers ask for, what rules imply.
//!
//! Into a bump: TUN and chains first, then the peer, whose packets may come by the bump from then on,
//! then our own mark. Back to plain: each end falls silent before it leaves, or TCP would take what is
//! overtaken for lost. Its kernel falls silent by the acknowledgements that it gets by the bump, so whoever
//! sends leaves first: the peer, or, when we send, we, once the peer has agreed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use dibs_policy::conntrack::{Conntrack, Tuple};
use dibs_policy::{BumpId, Place};

use crate::conns::{Choice, Pair, Version};
use crate::daemon::{Daemon, Handed, Unanswered};
use crate::live::{Live, bump_name};
use crate::messages::{Body, MAX_ENTRIES, Message, Outcome};
use crate::startup::{carried, marks};

/// How long `enable` waits for a connection that has something to send to be seen on the bump.
const SEEN_WITHIN: Duration = Duration::from_secs(1);
/// A connection that moves no byte for as long is taken to be idle.
const IDLE_AFTER: Duration = Duration::from_millis(150);
/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);
/// Before a peer that did not answer is told of choices again.
const TELL_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What came of a choice for one connection: moved, or why not.
pub(crate) type Moved = (Live, Result<(), String>);

/// A peer's answer for one connection.
type Answer = Result<(Outcome, u64), Unanswered>;

impl Daemon {
    /// Moves connections, as a user here chose: to `bump`, or to plain (0). What comes of it for each, in
    /// the same order.
    pub(crate) async fn choose(&self, lives: &[Live], bump: u8) -> anyhow::Result<Vec<Moved>> {
        let mut outcomes: HashMap<Pair, Result<(), String>> = HashMap::new();
        let mut by_peer: BTreeMap<usize, Vec<Live>> = BTreeMap::new();
        let translated = match bump {
            0 => HashMap::new(),
            _ => self.translated(lives).await?,
        };
        for live in lives {
            if let Some(why) = translated.get(&live.pair) {
                outcomes.insert(live.pair, Err(why.clone()));
            } else if live.bound {
                let why = "its socket is bound to a device and cannot be steered";
                outcomes.insert(live.pair, Err(why.to_owned()));
            } else if self.is_pending(&live.pair) {
                // What stood before it could not be told from what the peer knows then.
                let why = "it is being moved already";
                outcomes.insert(live.pair, Err(why.to_owned()));
            } else {
                by_peer.entry(live.peer).or_default().push(*live);
            }
        }
        let mut proposed: Vec<(Pair, Choice, Option<Choice>)> = Vec::new();
        let origins: HashMap<Pair, u8> = lives
            .iter()
            .map(|live| (live.pair, self.stands_on(live)))
            .collect();
        {
            let mut state = self.state.borrow_mut();
            for Live { pair, .. } in by_peer.values().flatten() {
                let before = state.choices.get(pair);
                let choice = state.choices.propose(*pair, bump, self.host, 0);
                proposed.push((*pair, choice, before));
            }
        }
        let prepared = async {
            self.save()?;
            self.install().await
        };
        if let Err(error) = prepared.await {
            let mut state = self.state.borrow_mut();
            for (pair, choice, before) in proposed {
                state.choices.take_back(&pair, choice.version, before);
            }
            return Err(error);
        }
        if bump != 0 {
            self.expect_rates(by_peer.values().flatten());
        }
        let asked = by_peer
            .iter()
            .map(|(peer, lives)| self.negotiate(*peer, lives, bump, true));
        let answers = futures_util::future::join_all(asked).await;
        let before: HashMap<Pair, Option<Choice>> = proposed
            .into_iter()
            .map(|(pair, _, before)| (pair, before))
            .collect();
        for (pair, version, answer) in answers.into_iter().flatten() {
            let verdict = answer.map(|(outcome, _)| outcome);
            let verdict = self
                .conclude(pair, version, bump, verdict, before[&pair], origins[&pair])
                .await;
            outcomes.insert(pair, verdict);
        }
        self.save()?;
        // What came back for want of an answer, too.
        self.confirmations_due.notify_one();
        if bump != 0 {
            let moved: Vec<&Live> = lives
                .iter()
                .filter(|live| outcomes.get(&live.pair) == Some(&Ok(())))
                .collect();
            self.wait_seen(&moved, bump).await?;
        }
        let outcome = |live: &Live| {
            let missing = || Err("it has ended".to_owned());
            outcomes.get(&live.pair).cloned().unwrap_or_else(missing)
        };
        Ok(lives.iter().map(|live| (*live, outcome(live))).collect())
    }

    fn is_pending(&self, pair: &Pair) -> bool {
        let choice = self.state.borrow().choices.get(pair);
        choice.is_some_and(|choice| choice.pending)
    }

    /// Asks a peer for its part. Connections that leave their bump while their kernel sends have left
    /// when this returns, if the peer agreed.
    async fn negotiate(
        &self,
        peer: usize,
        lives: &[Live],
        bump: u8,
        explicit: bool,
    ) -> Vec<(Pair, Version, Answer)> {
        let pairs: Vec<Pair> = lives.iter().map(|live| live.pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        let sending = match bump {
            0 => self.sending().await,
            _ => HashSet::new(),
        };
        let (first, others): (Vec<Live>, Vec<Live>) =
            lives.iter().partition(|live| sending.contains(&live.pair));
        let others: Vec<Pair> = others.iter().map(|live| live.pair).collect();
        let mut results = self.ask_all(peer, &others, bump, explicit, false).await;
        let pairs: Vec<Pair> = first.iter().map(|live| live.pair).collect();
        let mut leaving = Vec::new();
        for (pair, version, answer) in self.ask_all(peer, &pairs, bump, explicit, true).await {
            match answer {
                Ok((Outcome::Done, _)) => leaving.push(pair),
                refused => results.push((pair, version, refused)),
            }
        }
        self.silence(first.iter().filter(|live| leaving.contains(&live.pair)))
            .await;
        for pair in &leaving {
            let _turn = self.marking.lock().await;
            if let Err(error) = self.mark(pair, bump, explicit).await {
                tracing::warn!("{error}");
            }
        }
        results.extend(self.ask_all(peer, &leaving, bump, explicit, false).await);
        results
    }

    /// The connections whose kernels here send by a bump now.
    async fn sending(&self) -> HashSet<Pair> {
        // Without the data path nothing is under way.
        let Ok((now, conns)) = self.driver.conns().await else {
            return HashSet::new();
        };
        let sends = |spoke| now.since(spoke) < SENDS_WITHIN;
        conns
            .iter()
            .filter(|conn| conn.spoke.is_some_and(sends))
            .map(|conn| Pair {
                local: (conn.tuple.src, conn.tuple.sport).into(),
                remote: (conn.tuple.dst, conn.tuple.dport).into(),
            })
            .collect()
    }

    /// Asks a peer for its part; once more where it knew of a later choice.
    async fn ask_all(
        &self,
        peer: usize,
        pairs: &[Pair],
        bump: u8,
        explicit: bool,
        ready: bool,
    ) -> Vec<(Pair, Version, Answer)> {
        let mut results = Vec::new();
        for pairs in pairs.chunks(MAX_ENTRIES) {
            let mut again = Vec::new();
            let answers = self.ask_switch(peer, pairs, bump, explicit, ready).await;
            for (pair, version, answer) in answers {
                match answer {
                    Ok((Outcome::Older, generation)) if explicit => {
                        let mut state = self.state.borrow_mut();
                        // Unless that later choice has come here meanwhile: then it stands.
                        let known = state.choices.get(&pair);
                        if let Some(known) = known.filter(|known| known.version == version) {
                            state.choices.propose(pair, bump, self.host, generation);
                            again.push((pair, known));
                        } else {
                            results.push((pair, version, Ok((Outcome::Older, generation))));
                        }
                    }
                    other => results.push((pair, version, other)),
                }
            }
            if again.is_empty() {
                continue;
            }
            // Or the next daemon would give the version that the peer knows to another choice.
            if let Err(error) = self.save() {
                tracing::warn!("{error:#}");
                let choices = &mut self.state.borrow_mut().choices;
                for (pair, known) in again {
                    choices.restore(pair, known);
                    let older = (Outcome::Older, known.version.generation);
                    results.push((pair, known.version, Ok(older)));
                }
                continue;
            }
            let again: Vec<Pair> = again.into_iter().map(|(pair, _)| pair).collect();
            results.extend(self.ask_switch(peer, &again, bump, explicit, ready).await);
        }
        results
    }

    /// Sends one SWITCH; the answer for each connection with the version that it was asked for.
    async fn ask_switch(
        &self,
        peer: usize,
        pairs: &[Pair],
        bump: u8,
        explicit: bool,
        ready: bool,
    ) -> Vec<(Pair, Version, Answer)> {
        let conns: Vec<(Pair, Version)> = {
            let state = self.state.borrow();
            let ours = Version {
                generation: 0,
                host: self.host,
            };
            let version = |pair| match state.choices.get(pair) {
                Some(choice) if explicit && choice.version.host == self.host => choice.version,
                _ => ours,
            };
            pairs.iter().map(|pair| (*pair, version(pair))).collect()
        };
        let body = Body::Switch {
            bump,
            explicit,
            ready,
            conns: conns.clone(),
        };
        match self.ask(peer, body).await {
            Ok(outcomes) => {
                let mut outcomes = outcomes.into_iter();
                conns
                    .into_iter()
                    // An answer that is too short is no answer for the rest.
                    .map(|(pair, v)| (pair, v, outcomes.next().ok_or(Unanswered::Silent)))
                    .collect()
            }
            Err(error) => conns
                .into_iter()
                .map(|(pair, version)| (pair, version, Err(error)))
                .collect(),
        }
    }

    /// Carries out what the peer agreed to, takes back what it did not.
    async fn conclude(
        &self,
        pair: Pair,
        version: Version,
        bump: u8,
        verdict: Result<Outcome, Unanswered>,
        before: Option<Choice>,
        origin: u8,
    ) -> Result<(), String> {
        let refusal = match verdict {
            Ok(Outcome::Done) => None,
            // The peer's part waits for a session: the choice is sent again then.
            Err(Unanswered::NoSession) if bump == 0 => None,
            _ if self.state.borrow().choices.is_settled(&pair, version) => None,
            Ok(Outcome::Older) => Some("the other end chose otherwise at the same time".to_owned()),
            Ok(Outcome::NoConnection) => {
                Some("the peer has no such connection, or knows it by other addresses".to_owned())
            }
            Ok(Outcome::OwnRule) => Some("a rule of the peer wants it on its bump".to_owned()),
            Ok(Outcome::NoBump) => Some("the peer does not carry this bump".to_owned()),
            Ok(Outcome::Bound) => {
                Some("its socket at the peer is bound to a device and cannot be steered".to_owned())
            }
            Ok(Outcome::Failed) => Some("the peer's daemon could not; see its log".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        let Some(refusal) = refusal else {
            if !self.state.borrow_mut().choices.settle(&pair, version) {
                return Err("the other end chose otherwise at the same time".to_owned());
            }
            return self
                .mark_choice(&pair)
                .await
                .map_err(|error| error.to_string());
        };
        self.state
            .borrow_mut()
            .choices
            .take_back(&pair, version, before);
        if let Err(Unanswered::Silent) = verdict {
            let bump = before.map_or(origin, |choice| choice.bump);
            self.bring_back(pair, version, bump).await;
        } else if let Err(error) = self.mark_choice(&pair).await {
            tracing::warn!("{error}");
        }
        Err(refusal)
    }

    /// The bump that a connection is on, by whatever reason; 0: plain.
    fn stands_on(&self, live: &Live) -> u8 {
        match self.bump_of(live) {
            0 => {
                let state = self.state.borrow();
                state.handed.get(&live.pair).map_or(0, |known| known.bump)
            }
            bump => bump,
        }
    }

    /// A peer that did not answer may have moved a connection all the same: a later choice than the one
    /// that it was asked for puts it back to `bump`, where it was: by choice, or by rules or the peer.
    async fn bring_back(&self, pair: Pair, asked: Version, bump: u8) {
        let back = {
            let mut state = self.state.borrow_mut();
            let above = asked.generation;
            let back = state.choices.propose(pair, bump, self.host, above);
            state.choices.settle(&pair, back.version);
            back
        };
        if let Err(error) = self.save() {
            tracing::warn!("{error:#}");
        }
        if let Err(error) = self.mark_choice(&pair).await {
            tracing::warn!("{error}");
        }
        let body = Body::Switch {
            bump,
            explicit: true,
            ready: false,
            conns: vec![(pair, back.version)],
        };
        if let Some(peer) = self.peer_of(pair.remote.ip()) {
            // Nobody waits for the answer. Without a session it is sent with the next one.
            let _ = self.post(peer, Message { request: 0, body }).await;
        }
    }

    /// Sets the bump of one connection in its ctmark, which is made if it is not tracked. One that
    /// leaves its bump goes on.
    pub(crate) async fn mark(
        &self,
        pair: &Pair,
        bump: u8,
        explicit: bool,
    ) -> Result<(), dibs_policy::Error> {
        let marks = marks(&self.config);
        let chosen = if explicit { marks.override_bit() } else { 0 };
        let mut value = BumpId::new(bump).map_or(0, |bump| marks.bump(bump)) | chosen;
        let mut mask = marks.bump_mask() | marks.override_bit();
        let locked = self.state.borrow().locks.is_locked(pair, bump);
        if bump == 0 || locked {
            mask |= marks.locked_bit();
            value |= if locked { marks.locked_bit() } else { 0 };
        }
        let tuple = Tuple::tcp(pair.local, pair.remote);
        let mut conntrack = Conntrack::open()?;
        let mut backstop = self.backstop.lock().await;
        let written = (bump, Instant::now());
        self.state.borrow_mut().written.insert(*pair, written);
        if bump == 0 {
            self.state.borrow_mut().followed.remove(pair);
            let place = if explicit {
                Place::Plain
            } else {
                Place::Elsewhere
            };
            self.note_place(&mut backstop, pair, place).await;
            let marked = conntrack.set_mark(&tuple, value, mask).await;
            for bump in carried() {
                // Without the data path nothing is held back.
                let _ = self.driver.end_drain(bump.id.get(), ends(pair));
            }
            return marked.map(drop);
        }
        let installed = !self.state.borrow().installed.is_empty();
        let marked = conntrack.set_mark(&tuple, value, mask).await?;
        if !marked && installed && !conntrack.adopt(&tuple, value).await? {
            conntrack.set_mark(&tuple, value, mask).await?;
        }
        self.note_place(&mut backstop, pair, Place::Bumped).await;
        Ok(())
    }

    /// Tells the paths that connections come from, in plain, what these sent by them: the path's own
    /// congestion control has had nothing to learn from.
    fn expect_rates<'a>(&self, lives: impl Iterator<Item = &'a Live>) {
        let state = self.state.borrow();
        let mut rates: HashMap<(usize, IpAddr), u64> = HashMap::new();
        for live in lives {
            let local = live.pair.local.ip();
            let path = self.config.paths.iter().position(|path| {
                let interface = state.inventory.of_path(path);
                interface.is_some_and(|interface| interface.addresses.contains(&local))
            });
            if let Some(path) = path {
                let to = live.pair.remote.ip();
                *rates.entry((path, to)).or_default() += live.counts.delivery_rate;
            }
        }
        for ((path, to), rate) in rates {
            // Without the data path nothing is sent.
            let _ = self.driver.expect_rate(path, to, rate);
        }
    }

    /// Waits until nothing that connections sent by their bumps can be overtaken any more: in plain,
    /// what follows may be quicker. Their kernels send nothing new until they are [marked](Self::mark).
    async fn silence(&self, lives: impl Iterator<Item = &Live>) {
        let drains = lives.flat_map(|live| {
            carried().into_iter().map(|bump| {
                let scale = live.counts.window_scale;
                self.driver.drain(bump.id.get(), ends(&live.pair), scale)
            })
        });
        // Without the data path nothing is under way.
        let _ = futures_util::future::join_all(drains).await;
    }

    /// Puts the choice for one connection into the kernel, if there is one that is not pending. One at a
    /// time, and whichever is in force by then: so the last one that the kernel is told is the latest.
    pub(crate) async fn mark_choice(&self, pair: &Pair) -> Result<(), dibs_policy::Error> {
        let _turn = self.marking.lock().await;
        let choice = self.state.borrow().choices.get(pair);
        match choice.filter(|choice| !choice.pending) {
            Some(choice) => self.mark(pair, choice.bump, true).await,
            None => Ok(()),
        }
    }

    /// Puts all choices into the kernel again.
    pub(crate) async fn mark_choices(&self) {
        let choices: Vec<_> = self.state.borrow().choices.iter().collect();
        for (pair, _) in choices {
            if let Err(error) = self.mark_choice(&pair).await {
                tracing::warn!("{error}");
            }
        }
    }

    /// Waits until those connections that have something to send are seen on the bump, both ways.
    async fn wait_seen(&self, lives: &[&Live], bump: u8) -> anyhow::Result<()> {
        let start = tokio::time::Instant::now();
        let mut waiting: HashMap<Pair, (u64, u64)> =
            lives.iter().map(|live| (live.pair, moved(live))).collect();
        while !waiting.is_empty() && start.elapsed() < SEEN_WITHIN {
            tokio::time::sleep(LOOK_EVERY).await;
            let (_, conns) = self.driver.conns().await?;
            for conn in conns.iter().filter(|conn| conn.bump == bump && conn.opened) {
                waiting.remove(&Pair {
                    local: (conn.tuple.src, conn.tuple.sport).into(),
                    remote: (conn.tuple.dst, conn.tuple.dport).into(),
                });
            }
            if start.elapsed() >= IDLE_AFTER && !waiting.is_empty() {
                let now = self.sockets().await?;
                let now: HashMap<Pair, (u64, u64)> =
                    now.iter().map(|live| (live.pair, moved(live))).collect();
                // What moved nothing so far is idle, or ended.
                waiting.retain(|pair, before| now.get(pair).is_some_and(|after| after != before));
            }
        }
        Ok(())
    }

    /// Carries out a SWITCH of a peer.
    pub(crate) async fn on_switch(
        &self,
        peer: usize,
        bump: u8,
        explicit: bool,
        ready: bool,
        conns: Vec<(Pair, Version)>,
    ) -> Vec<(Outcome, u64)> {
        let known = bump == 0 || carried().iter().any(|carried| carried.id.get() == bump);
        let meant: Vec<Pair> = conns.iter().map(|(pair, _)| pair.reversed()).collect();
        let lives = match self.sockets_of(&meant).await {
            Ok(lives) => lives,
            Err(error) => {
                tracing::warn!("{error:#}");
                return vec![(Outcome::Failed, 0); conns.len()];
            }
        };
        let mut outcomes = Vec::with_capacity(conns.len());
        let mut moving = Vec::new();
        let mut news = 0;
        for (pair, version) in conns {
            let pair = pair.reversed();
            let live = lives.get(&pair).filter(|live| live.peer == peer);
            let verdict = match live {
                None => Err((Outcome::NoConnection, 0)),
                Some(_) if !known => Err((Outcome::NoBump, 0)),
                Some(live) if live.bound && bump != 0 => Err((Outcome::Bound, 0)),
                Some(live) => self.take_switch(live, bump, explicit, ready, version),
            };
            outcomes.push(match verdict {
                Ok(is_new) => {
                    news += usize::from(is_new);
                    moving.push((outcomes.len(), pair));
                    (Outcome::Done, version.generation)
                }
                Err(refused) => refused,
            });
        }
        if moving.is_empty() {
            return outcomes;
        }
        let pairs: Vec<Pair> = moving.iter().map(|(_, pair)| *pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        if bump == 0 {
            self.silence(moving.iter().map(|(_, pair)| &lives[pair]))
                .await;
        }
        if ready {
            return outcomes;
        }
        if bump != 0 {
            self.state.borrow_mut().arriving.extend(&pairs);
        }
        let prepared = async {
            self.save()?;
            self.install().await
        };
        let prepared = prepared.await;
        if bump != 0 {
            self.expect_rates(moving.iter().map(|(_, pair)| &lives[pair]));
        }
        for (index, pair) in moving {
            let done = match &prepared {
                Ok(()) if explicit => self.mark_choice(&pair).await.map_err(Into::into),
                Ok(()) => self.mark(&pair, bump, false).await.map_err(Into::into),
                Err(error) => Err(anyhow::anyhow!("{error:#}")),
            };
            if let Err(error) = done {
                tracing::warn!("cannot follow the peer's switch: {error:#}");
                outcomes[index].0 = Outcome::Failed;
            }
        }
        {
            let mut state = self.state.borrow_mut();
            pairs.iter().for_each(|pair| {
                state.arriving.remove(pair);
            });
        }
        self.confirmations_due.notify_one();
        if news == 0 {
            return outcomes;
        }
        let name = self.peer_name(peer).to_owned();
        let bump = bump_name(bump).to_owned();
        self.tell(
            "switched",
            format!("peer {name} moved {news} connection(s) to {bump}"),
            &[("peer", name), ("bump", bump), ("count", news.to_string())],
        );
        outcomes
    }

    /// Notes a peer's wish for one connection if it is to be carried out, unless the peer only asks
    /// whether it would be: then whether it is news.
    fn take_switch(
        &self,
        live: &Live,
        bump: u8,
        explicit: bool,
        ready: bool,
        version: Version,
    ) -> Result<bool, (Outcome, u64)> {
        let mut state = self.state.borrow_mut();
        let (local, remote) = (live.pair.local, live.pair.remote);
        let ruled = state
            .active_rules()
            .find(|rule| bump == 0 && rule.matches(local, remote, live.uid));
        let own = state.requirement(live).or(ruled);
        let own = own.map(|rule| rule.bump_id().get());
        if let Some(own) = own.filter(|own| *own != bump) {
            return Err((Outcome::OwnRule, own.into()));
        }
        let before = state.choices.get(&live.pair);
        if !explicit {
            if let Some(choice) = before {
                return Err((Outcome::Older, choice.version.generation));
            }
            let was = state.handed.get(&live.pair).map_or(0, |known| known.bump);
            if ready {
                return Ok(false);
            }
            if bump == 0 {
                state.handed.remove(&live.pair);
            } else if was != bump {
                let by_peer = true;
                state.handed.insert(live.pair, Handed { bump, by_peer });
            }
            return Ok(was != bump);
        }
        if ready {
            return match before {
                Some(known) if known.version > version => {
                    Err((Outcome::Older, known.version.generation))
                }
                _ => Ok(false),
            };
        }
        match state.choices.accept(live.pair, bump, version) {
            Ok(()) => Ok(before.is_none_or(|before| before.bump != bump)),
            Err(known) => Err((Outcome::Older, known.version.generation)),
        }
    }

    /// Moves connections here and at their peers because rules changed, not by choice.
    pub(crate) async fn follow_rules(&self, lives: &[Live], bump: u8) {
        let mut by_peer: BTreeMap<usize, Vec<Live>> = BTreeMap::new();
        for live in lives.iter().filter(|live| !live.bound) {
            by_peer.entry(live.peer).or_default().push(*live);
        }
        let moving: Vec<Pair> = by_peer.values().flatten().map(|live| live.pair).collect();
        self.state.borrow_mut().moving.extend(&moving);
        for (peer, lives) in by_peer {
            let answers = self.negotiate(peer, &lives, bump, false).await;
            let refused = answers
                .into_iter()
                .filter_map(|(pair, _, answer)| match answer {
                    Ok((Outcome::OwnRule, own)) if bump == 0 => Some((pair, own)),
                    _ => None,
                });
            let refused: HashMap<Pair, u64> = refused.collect();
            for Live { pair, .. } in lives {
                if let Some(own) = refused.get(&pair) {
                    self.follow_peer(&pair, *own).await;
                // What the peer does not take part in goes one way only, as rules allow.
                } else if let Err(error) = self.mark(&pair, bump, false).await {
                    tracing::warn!("{error}");
                }
            }
        }
        self.state
            .borrow_mut()
            .moving
            .retain(|pair| !moving.contains(pair));
        self.confirmations_due.notify_one();
    }

    /// Keeps a connection on the bump that a rule of the peer wants it on: of what we sent in plain the
    /// peer would take nothing, or answer it by the bump.
    async fn follow_peer(&self, pair: &Pair, own: u64) {
        let carried = carried();
        let mut numbers = carried.iter().map(|bump| bump.id.get());
        let Some(bump) = numbers.find(|bump| u64::from(*bump) == own) else {
            return tracing::warn!("a rule of a peer wants a bump that this host does not carry");
        };
        {
            let mut state = self.state.borrow_mut();
            let by_peer = true;
            state.handed.insert(*pair, Handed { bump, by_peer });
        }
        let followed = async {
            self.install().await?;
            let _turn = self.marking.lock().await;
            self.mark(pair, bump, false).await?;
            anyhow::Ok(())
        };
        if let Err(error) = followed.await {
            tracing::warn!("cannot follow a rule of a peer: {error:#}");
        }
    }

    /// A choice for plain that the peer refuses for a rule of its own, having heard of it only now.
    async fn give_in(&self, peer: usize, pair: Pair, version: Version, own: u64) {
        if !self.state.borrow_mut().choices.give_up(&pair, version) {
            return;
        }
        if let Err(error) = self.save() {
            tracing::warn!("{error:#}");
        }
        self.follow_peer(&pair, own).await;
        let name = self.peer_name(peer).to_owned();
        self.tell(
            "choice_refused",
            format!(
                "a rule of peer {name} wants a connection on its bump: it is not plain any more"
            ),
            &[("peer", name)],
        );
    }

    /// Tells a peer, whose session is new, all that concerns it, until it has answered.
    pub(crate) async fn resync(&self, peer: usize) {
        let turn = {
            let known = &mut self.state.borrow_mut().peers[peer];
            known.told += 1;
            known.told
        };
        while let Err(error) = self.tell_choices(peer).await {
            tracing::debug!(peer = self.peer_name(peer), "resync: {error}");
            // It is told with the next session.
            if !matches!(error, Unanswered::Silent | Unanswered::Full) {
                return;
            }
            tokio::time::sleep(TELL_AGAIN).await;
            if self.state.borrow().peers[peer].told != turn {
                return;
            }
        }
        match self.connections().await {
            Ok(lives) => {
                self.enforce(&lives, Some(peer)).await;
                let ruled = self.ruled(&lives, Some(peer));
                for (bump, lives) in ruled.into_iter().chain(self.followed_here(&lives, peer)) {
                    self.follow_rules(&lives, bump).await;
                }
            }
            Err(error) => tracing::warn!("{error:#}"),
        }
    }

    /// Tells a peer which bumps our rules use, and what was chosen for connections with it.
    async fn tell_choices(&self, peer: usize) -> Result<(), Unanswered> {
        self.send_want(peer).await?;
        let mut chosen: BTreeMap<(u8, u64), Vec<(Pair, Version)>> = BTreeMap::new();
        for (pair, choice) in self.state.borrow().choices.iter() {
            if !choice.pending && self.peer_of(pair.remote.ip()) == Some(peer) {
                let group = chosen.entry((choice.bump, choice.version.host));
                group.or_default().push((pair, choice.version));
            }
        }
        for ((bump, _), conns) in chosen {
            for conns in conns.chunks(MAX_ENTRIES) {
                let body = Body::Switch {
                    bump,
                    explicit: true,
                    ready: false,
                    conns: conns.to_vec(),
                };
                let outcomes = self.ask(peer, body).await?;
                // What else it refuses stays as it is there; it tells us of later choices itself.
                for ((pair, version), (outcome, own)) in conns.iter().zip(outcomes) {
                    if outcome == Outcome::OwnRule && bump == 0 {
                        self.give_in(peer, *pair, *version, own).await;
                    }
                }
            }
        }
        Ok(())
    }

    /// The connections that rules decide over, by the bump of the first rule that matches.
    pub(crate) fn ruled(&self, lives: &[Live], peer: Option<usize>) -> BTreeMap<u8, Vec<Live>> {
        let state = self.state.borrow();
        let mut ruled: BTreeMap<u8, Vec<Live>> = BTreeMap::new();
        for live in lives {
            let meant = !live.over
                && peer.is_none_or(|peer| live.peer == peer)
                && state.choices.get(&live.pair).is_none();
            let rule = state
                .active_rules()
                .filter(|_| meant)
                .find(|rule| rule.matches(live.pair.local, live.pair.remote, live.uid));
            if let Some(rule) = rule {
                let bump = rule.bump_id().get();
                ruled.entry(bump).or_default().push(*live);
            }
        }
        ruled
    }
}

/// The connection as the core names it.
pub(crate) fn ends(pair: &Pair) -> dibs_wire::Tuple {
    dibs_wire::Tuple {
        src: pair.local.ip(),
        dst: pair.remote.ip(),
        sport: pair.local.port(),
        dport: pair.remote.port(),
    }
}

/// Bytes that a connection moved, either way.
fn moved(live: &Live) -> (u64, u64) {
    (live.counts.bytes_acked, live.counts.bytes_received)
}
