//! The machine that the engine for switching works on: this host.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_policy::conntrack::Connection;
use dibs_policy::sockets::{self, TcpCounts, TcpSocket};
use dibs_settings::{BumpId, Level};
use dibs_switch::answering::Refusal;
use dibs_switch::conns::{Meant, Socket, host_id};
use dibs_switch::engine::entries::{Ends, Marked};
use dibs_switch::engine::shadows::Shadows;
use dibs_switch::engine::{self, Failed, Found, Goal, Machine, Mark, News, knocks, rules};
use dibs_switch::knock::{self, Standing};
use dibs_switch::matching::{Carrying, Matched, Stand};
use dibs_switch::messages::{Body, Outcome, Unanswered};
use dibs_switch::plausible::Hosts;
use dibs_switch::rules::{Ruling, Wants};
use dibs_switch::table::ConnTable;
use dibs_switch::tracked::{Entry, Mend, Tracked};
use dibs_wire::FlowKey;

use crate::control::{Audience, Turn};
use crate::data::bumps::marks;
use crate::host::live::Live;
use crate::host::process::{now, or_warn};
use crate::kernel::{connections, devices};
use crate::rulebook::rules::Rule;
use crate::rulebook::{Active, Rules};
use crate::switch::knocking::Plain;
use crate::switch::marking::MarkError;
use crate::switch::{
    Daemon, State, Task, entries, knocking, marking, paths, sessions, steering, switching,
};

/// A connection that nothing was seen of for as long is idle.
const ACTIVE_WITHIN: Duration = Duration::from_millis(200);

impl engine::Live for Live {
    fn meant(&self) -> Meant {
        self.into()
    }

    fn peer(&self) -> usize {
        self.peer
    }

    fn is_bound(&self) -> bool {
        self.bound
    }

    fn is_over(&self) -> bool {
        self.over
    }
}

/// Tasks of the daemon that a task of the engine stands for.
fn tasks(task: engine::Task) -> &'static [Task] {
    match task {
        engine::Task::Tell => &[Task::Tell],
        engine::Task::Confirm => &[Task::Confirm],
        engine::Task::Lock => &[Task::Lock],
        engine::Task::Shadow => &[Task::Shadow],
        engine::Task::Match => &[Task::Match],
        engine::Task::Sessions => &[Task::Sessions],
        engine::Task::Rules => &[Task::Hours, Task::Sessions, Task::Users],
    }
}

impl Machine for Daemon {
    type Live = Live;
    type Rule = Rule;
    type Rules<'a> = Active<'a>;
    type Book = Rules;
    type Fault = anyhow::Error;
    type MarkFault = MarkError;
    type Why = String;
    type Plain = Plain;
    type Turn<'a> = Turn<'a>;

    async fn turn(&self) -> Turn<'_> {
        self.users.own_turn().await
    }

    fn now(&self) -> Time {
        now()
    }

    fn peers(&self) -> usize {
        self.config.peers.len()
    }

    fn peer_of(&self, pair: &FlowKey) -> Option<usize> {
        self.host.peer_of(pair)
    }

    fn hosts(&self, peer: usize) -> Hosts {
        Hosts {
            own: self.host_id,
            peer: host_id(self.config.peers[peer].public_key.as_bytes()),
        }
    }

    fn is_outside(&self, bump: Option<BumpId>) -> bool {
        self.bumps.is_outside(bump)
    }

    fn carries(&self, bump: BumpId) -> bool {
        self.bumps.get(bump).is_some()
    }

    fn locks(&self) -> bool {
        entries::locks(self)
    }

    fn is_steering(&self) -> bool {
        !self.state.borrow().installed.is_empty()
    }

    fn passes(&self, pair: &FlowKey) -> bool {
        connections::passes(&self.host, pair)
    }

    fn has_rule(&self, level: Level) -> bool {
        let state = self.state.borrow();
        let mut rules = state.rules.in_force();
        rules.any(|rule| rule.level == level)
    }

    fn answers<R>(&self, peer: usize, access: impl FnOnce(&mut bool) -> R) -> R {
        access(&mut self.state.borrow_mut().peers[peer].answers)
    }

    async fn sessions(&self) -> anyhow::Result<Vec<bool>> {
        Ok(sessions::sessions(self).await?)
    }

    fn conns<R>(&self, access: impl FnOnce(&mut ConnTable) -> R) -> R {
        access(&mut self.state.borrow_mut().conns)
    }

    fn ruling<R>(
        &self,
        live: &Live,
        ask: impl for<'a> FnOnce(Ruling<'a, Active<'a>, Live>) -> R,
    ) -> R {
        ask(self.state.borrow().ruling(live))
    }

    fn replace_rules(&self, rules: Rules) -> Rules {
        self.state.borrow_mut().rules.replace(rules)
    }

    fn rules_want(&self, peer: usize) -> u16 {
        let state = self.state.borrow();
        sessions::bumps_of(self, state.rules.in_force(), peer)
    }

    fn book_wants(&self, rules: &Rules, peer: usize) -> u16 {
        sessions::bumps_of(self, rules.in_force(), peer)
    }

    fn coming<R>(&self, peer: usize, access: impl FnOnce(&mut u16) -> R) -> R {
        access(&mut self.state.borrow_mut().peers[peer].coming)
    }

    fn wants<R>(&self, peer: usize, access: impl FnOnce(&mut Wants, &mut ConnTable) -> R) -> R {
        let State { conns, peers, .. } = &mut *self.state.borrow_mut();
        access(&mut peers[peer].wants, conns)
    }

    fn want(&self, bumps: u16) -> Body {
        Body::Want {
            sequence: self.rpc.next_sequence(),
            bumps,
            devices: self.bumps.device_names().into_iter().collect(),
        }
    }

    fn marked(&self, live: &Live) -> Option<BumpId> {
        marks(&self.config).bump_of(live.mark)
    }

    fn is_opening(&self, live: &Live) -> bool {
        live.opening
    }

    fn save(&self) -> anyhow::Result<()> {
        self.save()
    }

    async fn install(&self) -> anyhow::Result<()> {
        steering::install(self).await
    }

    async fn steer(&self) -> anyhow::Result<()> {
        steering::steer(self).await.map(drop)
    }

    async fn unpin(&self, pairs: &[FlowKey]) -> anyhow::Result<()> {
        let is_pinned = |pair| self.state.borrow().pinned.contains_key(pair);
        if pairs.iter().any(is_pinned) {
            steering::steer(self).await?;
        }
        Ok(())
    }

    async fn lives(&self) -> anyhow::Result<Vec<Live>> {
        self.connections().await
    }

    async fn strangers(&self) -> anyhow::Result<Vec<Live>> {
        let up = sessions::sessions(self).await?;
        let mut routers: HashMap<IpAddr, BTreeSet<usize>> = HashMap::new();
        for path in self.driver.snapshot().await?.paths {
            let address = path.remote.ip();
            // What comes from a peer's own address is known to be its own.
            if up[path.peer] && self.host.peer_behind(address).is_none() {
                routers.entry(address).or_default().insert(path.peer);
            }
        }
        Ok(connections::strange(&self.kernel, &routers).await?)
    }

    async fn find(&self, pairs: &[FlowKey]) -> anyhow::Result<Found<Self>> {
        Ok(connections::sockets_of(&self.kernel, pairs).await?)
    }

    async fn look_up(&self, pairs: &[FlowKey]) -> anyhow::Result<(Found<Self>, Tracked)> {
        self.looked_up(pairs).await
    }

    async fn alive(&self, known: &[FlowKey]) -> anyhow::Result<Vec<(FlowKey, Socket)>> {
        let _turn = self.kernel.looking().await;
        connections::sockets_of_as(&self.kernel, known, |live| (live.pair, live.socket)).await
    }

    async fn entry(&self, pair: &FlowKey) -> anyhow::Result<Option<Entry>> {
        let _turn = self.kernel.marking().await;
        let found = self.kernel.conntrack()?.get(pair).await?;
        Ok(found.map(|found| self.entry(&found)))
    }

    async fn entries(&self) -> anyhow::Result<Vec<(Ends, Entry)>> {
        let entry = |found: Connection| {
            connections::note(&self.host, &found);
            let is_of_peer = connections::ends_to_peers(&self.host, &found)
                .next()
                .is_some();
            is_of_peer.then(|| (connections::ends(&self.host, &found), self.entry(&found)))
        };
        Ok(self.kernel.conntrack()?.list(entry).await?)
    }

    async fn survey(
        &self,
        known: Option<&[FlowKey]>,
    ) -> anyhow::Result<(Vec<(FlowKey, bool)>, Tracked)> {
        let _turn = self.kernel.looking().await;
        let ends = |live: Live| (live.pair, live.established);
        let Some(known) = known else {
            let lives = connections::sockets_as(&self.kernel, |live| Some(ends(live))).await?;
            return Ok((lives, entries::tracked(self).await?));
        };
        let mut lives = connections::sockets_of_as(&self.kernel, known, ends).await?;
        // The other end of some may be ours as well.
        let found: HashSet<FlowKey> = lives.iter().map(|(pair, _)| *pair).collect();
        let missing = known.iter().filter(|pair| !found.contains(pair));
        let missing: Vec<FlowKey> = missing.map(|pair| pair.reversed()).collect();
        lives.extend(connections::sockets_of_as(&self.kernel, &missing, ends).await?);
        Ok((lives, entries::tracked_of(self, known).await?))
    }

    async fn active(&self, _: &[FlowKey]) -> BTreeSet<FlowKey> {
        // Without the data path nothing is under way.
        let Ok((now, conns)) = self.driver.conns().await else {
            return BTreeSet::new();
        };
        let active = { conns.iter() }.filter(|conn| now.since(conn.last_seen) < ACTIVE_WITHIN);
        active.map(|conn| conn.tuple).collect()
    }

    async fn refused(
        &self,
        lives: &[Live],
        goal: Goal,
    ) -> anyhow::Result<BTreeMap<FlowKey, String>> {
        switching::refused_here(self, lives, goal).await
    }

    async fn steerable(&self, lives: &[Live], bump: Option<BumpId>) -> Vec<Live> {
        let lives = connections::steerable(&self.host, lives, bump).await;
        or_warn(entries::unbind(self, &lives, bump).await).unwrap_or(lives)
    }

    async fn uncarried(&self, lives: &[Live]) -> rules::Kept {
        let refusals = knocks::refusals(self, lives).await;
        let refusals = refusals.unwrap_or_else(|error| {
            tracing::warn!(
                "cannot find out whether the network carries connections in plain: {error:#}"
            );
            let unknown = |live: &Live| (live.pair, knock::Refusal::Unknown);
            lives.iter().map(unknown).collect()
        });
        connections::spread_refusals(lives, refusals)
    }

    fn plain(&self, pairs: impl Iterator<Item = FlowKey>) -> anyhow::Result<Plain> {
        Plain::open(self, pairs)
    }

    fn plain_by_numbers(&self, conns: &[(FlowKey, Stand)]) -> anyhow::Result<Plain> {
        Plain::by_numbers(self, conns)
    }

    async fn numbers(&self, pairs: &[FlowKey]) -> anyhow::Result<BTreeMap<FlowKey, Standing>> {
        knocking::numbers_of(self, pairs).await
    }

    async fn stands(&self, pairs: &BTreeSet<FlowKey>) -> anyhow::Result<BTreeMap<FlowKey, Stand>> {
        knocking::stands_of(self, pairs).await
    }

    async fn sockets(&self, pairs: &[FlowKey]) -> anyhow::Result<BTreeMap<FlowKey, Carrying>> {
        let found = sockets::find(pairs).await?.into_iter();
        let carrying = |found: TcpSocket| {
            let counts = found.counts;
            // Of what the kernel does not tell, anything is possible.
            let of = |count: fn(&TcpCounts) -> u64| counts.as_ref().map_or(u64::MAX, count);
            let carrying = Carrying {
                socket: Socket(found.cookie as u32),
                sent: of(|counts| counts.bytes_acked + u64::from(counts.outstanding)),
                received: of(|counts| counts.bytes_received),
            };
            (found.key, carrying)
        };
        let mut carrying: BTreeMap<FlowKey, Carrying> = found.map(carrying).collect();
        let rest = { pairs.iter() }.filter(|pair| !carrying.contains_key(pair));
        let rest = connections::carried_elsewhere(&self.kernel, rest.copied()).await?;
        carrying.extend(rest);
        Ok(carrying)
    }

    async fn addresses_of(&self, peer: usize) -> anyhow::Result<BTreeSet<IpAddr>> {
        let paths = self.driver.snapshot().await?.paths;
        let of_peer = paths.iter().filter(|path| path.peer == peer);
        Ok(of_peer.map(|path| path.remote.ip()).collect())
    }

    async fn carried(&self) -> Option<Vec<ConnSnapshot>> {
        self.driver.conns().await.ok().map(|(_, conns)| conns)
    }

    fn window_scale(&self, live: &Live) -> u8 {
        live.counts.window_scale
    }

    fn lacks_plain(&self, pair: &FlowKey) -> Option<knock::Refusal> {
        self.host.lacks_plain(pair)
    }

    fn keeps_plain_open(&self) -> bool {
        self.config.daemon.keep_plain_open
    }

    fn matched(&self) -> Vec<FlowKey> {
        self.host.matched().keys().copied().collect()
    }

    fn is_matched(&self, pair: &FlowKey) -> bool {
        self.host.matched().contains_key(pair)
    }

    fn match_names(&self, pair: FlowKey, known: Matched) -> anyhow::Result<()> {
        Ok(self.host.match_names(pair, known)?)
    }

    fn note_copies(&self, [left_out, unfit]: [u64; 2]) {
        let known = self.host.copies.get();
        self.host
            .copies
            .set([known[0] + left_out, known[1] + unfit]);
    }

    fn shadows<R>(&self, access: impl FnOnce(&mut Shadows) -> R) -> R {
        access(&mut self.host.shadows.borrow_mut())
    }

    async fn unfit(&self, peer: usize, bump: Option<BumpId>, pairs: &[FlowKey]) -> Option<Refusal> {
        let known = bump.is_none_or(|bump| self.bumps.get(bump).is_some());
        or_warn(entries::unbind_pairs(self, pairs, bump).await);
        let addresses = pairs.iter().map(|pair| pair.src);
        let fault = devices::device_fault(&self.host, &self.bumps, bump, addresses).await;
        let fault = fault.unwrap_or_else(|error| Some(format!("{error:#}")));
        if let Some(why) = &fault {
            self.warn_of_peer(peer, &format!("cannot move connections as it asked: {why}"));
        }
        match (fault, known) {
            (_, false) => Some(Refusal::NoBump),
            (Some(_), true) => Some(Refusal::NoDevice),
            (None, true) => None,
        }
    }

    async fn mark(&self, marks: impl FnOnce() -> Vec<Mark>) -> Failed<Self> {
        let _turn = self.kernel.marking().await;
        let failed = marking::mark(self, &marks()).await;
        self.wakers.wake(Task::Shadow);
        failed
    }

    async fn mark_choices(&self, pairs: &[FlowKey]) -> Failed<Self> {
        let failed = marking::mark_choices(self, pairs).await;
        self.wakers.wake(Task::Shadow);
        failed
    }

    async fn clear(&self, gone: impl FnOnce() -> Vec<FlowKey>) -> Failed<Self> {
        let _turn = self.kernel.marking().await;
        let none: Vec<Mark> = { gone().into_iter() }
            .map(|pair| Mark::moved(pair, None))
            .collect();
        marking::write(self, &none).await
    }

    async fn note_followed(&self, ends: &Ends, bump: Option<BumpId>) {
        marking::note_followed(self, ends, bump).await;
    }

    async fn mend(&self, mends: &[(FlowKey, Mend)]) -> anyhow::Result<()> {
        entries::mend(self, mends).await
    }

    async fn unlock(&self, pairs: &[FlowKey]) {
        marking::note_locks(self).await;
        let _turn = self.kernel.marking().await;
        let cleared = async {
            let mut conntrack = self.kernel.conntrack()?;
            let locked = marks(&self.config).locked_bit();
            for pair in pairs {
                conntrack.set_mark(pair, 0, locked).await?;
            }
            Ok::<_, dibs_policy::Error>(())
        };
        // It is cleared with the bump; until then plain packets are lost.
        self.events.note("unlock connections", cleared.await);
    }

    async fn silence(&self, lives: &[Live], refusing: &BTreeSet<FlowKey>) {
        marking::silence(self, lives.iter(), refusing).await;
    }

    fn end_drains(&self, pair: &FlowKey) {
        marking::end_drains(self, pair);
    }

    fn solicit(&self, pair: &FlowKey, bump: Option<BumpId>) {
        if let Some(bump) = self.bumps.inside(bump) {
            // Without the data path nothing goes on.
            let _ = self.driver.solicit(bump, *pair);
        }
    }

    fn expect(&self, pair: &FlowKey, bump: BumpId) {
        // Without the data path nothing comes there.
        let _ = self.driver.enter(bump, *pair, None);
    }

    fn expect_rates(&self, lives: &[Live]) {
        marking::expect_rates(self, lives.iter());
    }

    async fn ask(&self, peer: usize, body: Body) -> Result<Vec<(Outcome, u64)>, Unanswered> {
        self.rpc.ask(peer, body).await
    }

    async fn answer_beside(&self, peer: usize, question: Body) -> Vec<(Outcome, u64)> {
        match question {
            Body::Silent { sequence, ports } => {
                sessions::handle_message(self, peer, sequence, ports);
                vec![(Outcome::Done, 0)]
            }
            Body::Measure { run, named, paths } => {
                paths::answer_measure(self, peer, (run, named), paths).await
            }
            _ => unreachable!("all else is about switching"),
        }
    }

    async fn sleep(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }

    fn wake(&self, task: engine::Task) {
        tasks(task).iter().for_each(|task| self.wakers.wake(*task));
    }

    async fn woken(&self, task: engine::Task) {
        let [task, ..] = tasks(task) else { return };
        self.wakers.woken(*task).await;
    }

    fn spawn(&self, rest: impl Future<Output = ()> + 'static) {
        tokio::task::spawn_local(rest);
    }

    fn note_done(&self, what: &'static str, done: anyhow::Result<()>) {
        self.events.note(what, done);
    }

    fn tell(&self, news: News<'_, Live, Rule>) {
        tracing::trace!(?news, "switching");
        match news {
            News::Refused(Refusal::Implausible(why)) | News::Implausible(why) => {
                self.state.borrow_mut().refused.note(why);
            }
            News::Peer { peer, why } => self.warn_of_peer(peer, why),
            News::Fault(why) => tracing::warn!("{why}"),
            News::Marked(Marked {
                conn, bump, chosen, ..
            }) => {
                let bump = self.bumps.name_of(bump).to_owned();
                let text = match chosen {
                    true => format!("another program moved a connection to {bump}"),
                    false => format!("another program returned a connection to {bump}"),
                };
                let audience = Audience::of(conn.uid);
                self.events
                    .tell_of(audience, "marked", text, &[("bump", bump)]);
            }
            News::Switched { peer, bump, conns } => {
                let name = self.peer_name(peer).to_owned();
                let bump = self.bumps.name_of(bump).to_owned();
                self.events.tell_of_conns(
                    conns.iter().map(|live| live.uid),
                    "switched",
                    |count| format!("peer {name} moved {count} connection(s) to {bump}"),
                    &[("peer", name.clone()), ("bump", bump.clone())],
                );
            }
            News::GivenUp { peer, conn, .. } => {
                let name = self.peer_name(peer).to_owned();
                self.events.tell_of(
                    Audience::of(conn.and_then(|live| live.uid)),
                    "choice_refused",
                    format!(
                        "a rule of peer {name} overruled a choice made here: the connection moves to the bump of that rule"
                    ),
                    &[("peer", name)],
                );
            }
            News::Unfound { conn, why } => {
                let text = switching::unfound(&conn.pair, why);
                let audience = Audience::of(conn.uid);
                self.events.tell_of(audience, "unfound", text, &[]);
            }
            News::Kept { rule, count, why } => {
                let (id, bump) = (rule.id, &rule.bump);
                self.events.tell_of(
                    rule.audience(),
                    "kept",
                    format!(
                        "rule {id} is not in force any more, but {count} connection(s) of it stay on {bump}: {why}"
                    ),
                    &[("rule", id.to_string()), ("bump", bump.clone())],
                );
            }
            _ => {}
        }
    }
}
