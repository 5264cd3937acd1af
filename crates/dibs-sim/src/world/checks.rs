//! What must hold of the daemons, and how they look when it does not.

use std::time::Duration;

use dibs_core::bump::SCRAMBLE;
use dibs_core::counters::Counter;
use dibs_core::node::Node;
use dibs_settings::BumpId;
use dibs_switch::conns::Choice;
use dibs_wire::FlowKey;

use super::World;
use crate::conn::Conn;
use crate::coverage::Seen;
use crate::history::name;
use crate::kernel::Kernel;
use crate::steering::{Mark, Steering};

/// So long may be held what came behind a gap.
const HELD: Duration = Duration::from_secs(90);
/// So long may shares wait for others.
const SPLIT: Duration = Duration::from_secs(10);

pub(super) fn check_bounds(world: &World, host: usize) -> Result<(), String> {
    let Some(node) = &world.hosts[host].node else {
        return Ok(());
    };
    for peer in node.peers(world.now) {
        // What each end says in its hello that it can hold.
        if peer.held > 32 << 20 || peer.unacknowledged > (32 << 20) + (64 << 10) {
            return Err(format!("bounds exceeded at {}: {peer:?}", name(host)));
        }
        if peer.sets.1 > 32 << 20 {
            return Err(format!(
                "too many shares at {}: {:?}",
                name(host),
                peer.sets
            ));
        }
    }
    let h = &world.hosts[host];
    // After a restart of host 1 it calls connections that began on a bump by the addresses that it lends, until host 0 speaks.
    let is_lent = world.setup.between.translates && host == 0;
    // Host 1 says to whom it is over, by whichever way that went.
    let stray = match world.setup.between.translates {
        true => u64::MAX,
        false => h.stray,
    };
    let refused = match world.foreign[1 - host] || is_lent {
        true => u64::MAX,
        false => 0,
    };
    for (counter, expected) in [
        (Counter::CrcMismatch, 0),
        (Counter::PeerContradiction, 0),
        (Counter::AckRefused, 0),
        (Counter::FrameMalformed, 0),
        (Counter::InnerAddress, refused),
        (Counter::InnerProtocol, 0),
        (Counter::TunRefused, 0),
        (Counter::TunMalformed, h.malformed),
        (Counter::TunNoPeer, stray),
        (Counter::KeysExhausted, 0),
        (Counter::ShareMismatch, 0),
        (Counter::BumpUnknown, 0),
    ] {
        if node.counters().get(counter) > expected {
            return Err(format!(
                "{} between honest ends, at {}",
                counter.name(),
                name(host)
            ));
        }
    }
    let pairs = h.steering.matched();
    let wrong = pairs.iter().find(|(ours, known)| {
        let conn = world.conn_of(host, ours);
        // Over the wire it has the name of the host that showed it.
        conn.is_some_and(|conn| {
            let [here, there] = [host, 1 - host].map(|host| world.conns[conn].pairs[host]);
            ![here, there.reversed()].contains(&known.theirs)
        })
    });
    if let Some((ours, known)) = wrong {
        return Err(format!("{} takes {ours:?} for {known:?}", name(host)));
    }
    h.steering.check()
}

/// The daemons have had time to agree on what is still open.
pub(super) fn check_agreement(world: &World) -> Result<(), String> {
    let [a, b] = &world.hosts;
    for conn in world.conns.iter().filter(|c| c.lingers) {
        // A rule that requires the bump stands above choices.
        let planned = conn.plan.require != [None; 2];
        // A socket that waits for a call has no connection yet, so nothing of it is locked.
        let has_none =
            |host: usize, kernel: &Kernel| !conn.lives(host, kernel) || conn.listens(host, kernel);
        if planned || has_none(0, &a.kernel) || has_none(1, &b.kernel) {
            continue;
        }
        let at = |host: usize| {
            let (pair, h) = (&conn.pairs[host], &world.hosts[host]);
            (h.steering.choice(pair), h.steering.mark(pair))
        };
        let ends = [at(0), at(1)];
        let is_strange = world.setup.between.translates
            && conn.pairs[1] == super::route::translated(&conn.pairs[0])
            && !b.steering.matched().contains_key(&conn.pairs[1]);
        if is_strange {
            // Host 1 knows nothing of it.
            match ends.iter().all(|(_, mark)| mark.bump.is_none()) {
                true => continue,
                false => return Err(format!("one end is on a bump alone: {ends:?}")),
            }
        }
        let [(_, here), (_, there)] = ends;
        if (here.locked || there.locked) && here.bump != there.bump {
            return Err(format!("{:?} is locked to one end: {ends:?}", conn.ports));
        }
        if check_ruled(world, conn, ends)? {
            continue;
        }
        let said = |(choice, _): (Option<Choice>, Mark)| choice.map(|c| (c.bump, c.version));
        if said(ends[0]) != said(ends[1]) {
            return Err(format!("no agreement on {:?}: {ends:?}", conn.ports));
        }
        for (host, (choice, mark)) in ends.into_iter().enumerate() {
            let Some(choice) = choice else {
                // Another program took it to plain, where it was, before host 1 knew whose it is.
                let was_strange = world.setup.between.translates && host == 1;
                if mark.chosen && !(was_strange && mark.bump.is_none()) {
                    return Err(format!(
                        "nothing is chosen for {:?}, but {mark:?} stands at {}",
                        conn.ports,
                        name(host)
                    ));
                }
                continue;
            };
            let in_force =
                mark.chosen && mark.bump == choice.bump && mark.locked == (choice.bump.is_some());
            if !in_force {
                return Err(format!(
                    "what was chosen for {:?} is not in force at {}: {choice:?} {mark:?}",
                    conn.ports,
                    name(host)
                ));
            }
        }
    }
    Ok(())
}

/// That a connection is where rules have it, if they decide: whether they do.
fn check_ruled(
    world: &World,
    conn: &Conn,
    ends: [(Option<Choice>, Mark); 2],
) -> Result<bool, String> {
    let of = |what: fn(&Steering, &FlowKey) -> Option<BumpId>| {
        [0, 1].map(|host: usize| what(&world.hosts[host].steering, &conn.pairs[host]))
    };
    let required = of(Steering::requires).into_iter().flatten().next();
    let chosen = ends.iter().any(|(choice, _)| choice.is_some());
    let wanted = match (required, of(Steering::ruled)) {
        (Some(bump), _) | (None, [Some(bump), None] | [None, Some(bump)]) => [bump; 2],
        (None, [Some(first), Some(second)]) => [first, second],
        (None, [None, None]) => return Ok(false),
    };
    if required.is_none() && chosen {
        return Ok(false);
    }
    let first = wanted[0];
    let locked = wanted == [first; 2];
    for (host, (choice, mark)) in ends.into_iter().enumerate() {
        // Of two rules that contradict each other each takes its host's packets as they are sent.
        let is_there = wanted[0] != wanted[1] || mark.bump == Some(wanted[host]);
        let overrules = choice.is_some_and(|choice| choice.bump != Some(first));
        if !is_there || mark.locked != locked || overrules {
            return Err(format!(
                "rules want {:?} on {wanted:?}, but at {} are {choice:?} {mark:?}",
                conn.ports,
                name(host)
            ));
        }
    }
    Ok(true)
}

/// Number of open connections on bumps where nothing keeps them any more: no choice, no rule, no other program, and plain carries them.
pub(super) fn unkept(world: &World) -> usize {
    let [a, b] = &world.hosts;
    let is_unkept = |conn: &&Conn| {
        let on_bump = |host: usize| {
            let (steering, pair) = (&world.hosts[host].steering, &conn.pairs[host]);
            let is_ruled = steering.requires(pair).or(steering.ruled(pair)).is_some();
            let stays = is_ruled || steering.choice(pair).is_some() || steering.is_kept(pair);
            (!stays).then(|| steering.mark(pair).bump.is_some())
        };
        let goes_on = conn.lingers && conn.lives(0, &a.kernel) && conn.lives(1, &b.kernel);
        let planned = conn.plan.require != [None; 2];
        let ends = [on_bump(0), on_bump(1)];
        goes_on && !planned && !ends.contains(&None) && ends.contains(&Some(true))
    };
    world.conns.iter().filter(is_unkept).count()
}

/// Puts together what happened.
pub(super) fn gather(world: &mut World) {
    for h in &mut world.hosts {
        world.coverage.add(&h.kernel.seen);
        world.coverage.add(&h.steering.seen());
        if let Some(node) = &h.node {
            world.coverage.add_counters(node.counters());
        }
    }
    world.coverage.add(world.observer.coverage());
    for conn in &world.conns {
        let required = conn.plan.require != [None; 2];
        for (happened, what) in [
            (!conn.aborted, Seen::Finished),
            (!conn.aborted && required, Seen::RequiredFinished),
            (conn.closes[0], Seen::SimultaneousClose),
            (conn.closes[1], Seen::HalfClosed),
            (conn.stopped, Seen::ReaderStopped),
        ] {
            if happened {
                world.coverage.note(what);
            }
        }
    }
}

/// At least the agreed share of a connection's bytes went by trusted paths.
fn check_share(world: &World, host: usize) -> Result<(), String> {
    let share = world.setup.trusted_share;
    let node = world.hosts[host].node.as_ref();
    let conns = node.map(|n| n.conns()).unwrap_or_default();
    for conn in conns.iter().filter(|conn| conn.bump == SCRAMBLE) {
        let sent = |trusted: bool| -> u64 {
            let of = conn.by_path.iter();
            let of = of.filter(|(path, _)| world.links[*path].trusted == trusted);
            of.map(|(_, bytes)| bytes.sent).sum()
        };
        let (trusted, untrusted) = (conn.stats.bytes_trusted, sent(false));
        let all = trusted + untrusted;
        // The places are drawn; of few bytes the share may be less by chance.
        let least = 0.8 * share * all as f64 - 60_000.0;
        if world.setup.hold_without_trusted && (trusted as f64) < least {
            return Err(format!(
                "{trusted} of {all} bytes by trusted paths at {}, {share} was agreed to",
                name(host)
            ));
        }
    }
    Ok(())
}

/// Everything has been delivered and some time has passed: nothing may be left.
/// `datagrams` were sent in the last 10 s: those that keep paths and sessions. `at_last`: what may
/// take long has had its time.
pub(super) fn check_rest(world: &World, datagrams: u64, at_last: bool) -> Result<(), String> {
    if datagrams > 200 * world.links.len() as u64 {
        return Err(format!("{datagrams} datagrams in 10 s of silence"));
    }
    for (host, h) in world.hosts.iter().enumerate() {
        check_share(world, host)?;
        let Some(node) = &h.node else { continue };
        for peer in node.peers(world.now) {
            if peer.unacknowledged > 0 {
                return Err(format!(
                    "{} still waits for the acknowledgement of {} bytes",
                    name(host),
                    peer.unacknowledged
                ));
            }
            // A kernel that has not heard of the other end's abort sends again and again.
            let goes_on = |node: &Node, time| {
                let conns = node.conns();
                at_last && conns.iter().any(|c| c.last_seen + time > world.now)
            };
            // Its flow is unknown to a host that refuses its name, as after a restart of the host that lends it.
            let far = world.hosts[1 - host].node.as_ref();
            let is_split = far.is_some_and(|far| goes_on(far, SPLIT));
            if peer.sets != (0, 0) && !is_split {
                return Err(format!(
                    "{} still has sets of shares: {:?}",
                    name(host),
                    peer.sets
                ));
            }
            if peer.held > 0 && !goes_on(node, HELD) {
                return Err(format!("{} still holds {} bytes", name(host), peer.held));
            }
        }
    }
    let is_late = |conn: &&Conn| !conn.is_done() && !is_forgotten(world, conn);
    if let Some(late) = world.conns.iter().find(is_late) {
        return Err(format!("{:?} is not done", late.ports));
    }
    Ok(())
}

/// True if nobody can know that a connection was on a bump: another program took it to plain, which does not carry it, and the daemon of
/// host 0 began anew before it made anything of that; so did that of host 1, and has forgotten what host 0 calls it.
pub(super) fn is_forgotten(world: &World, conn: &Conn) -> bool {
    let ([a, b], [here, there]) = (&world.hosts, &conn.pairs);
    let is_lent = world.setup.between.translates && *there == super::route::lent(here);
    let is_lost = a.steering.is_lost(here) && a.steering.mark(here).bump.is_none();
    let is_unnamed = |node: &Node| node.theirs(0, *there) == *there;
    is_lent && is_lost && b.node.as_ref().is_some_and(is_unnamed)
}

pub(super) fn describe(world: &World) -> String {
    let [a, b] = &world.hosts;
    let mut text = String::new();
    for (number, conn) in world.conns.iter().enumerate() {
        let done = if conn.is_done() { "done" } else { "open" };
        text += &format!(
            "conn {number} {done} {}\n",
            conn.describe([&a.kernel, &b.kernel])
        );
        for (h, pair) in [a, b].into_iter().zip(&conn.pairs) {
            let s = &h.steering;
            text += &format!("  {:?} {:?}\n", s.mark(pair), s.choice(pair));
        }
    }
    for (host, h) in world.hosts.iter().enumerate() {
        text += &format!("{}: ", name(host));
        let Some(node) = &h.node else {
            text += "no daemon\n";
            continue;
        };
        text += &format!("{:?}\n", node.peers(world.now));
        for path in node.paths() {
            text += &format!("  {path:?}\n");
        }
        for conn in node.conns() {
            text += &format!("  {conn:?}\n");
        }
        let counts = node.counters().iter().filter(|(_, n)| *n > 0);
        for (counter, n) in counts {
            text += &format!("  {counter} {n}");
        }
        text += "\n";
    }
    text
}
