//! Connections that are shown in plain while they are on a bump, so that routers do not lose track of them: those that the two hosts
//! call by different addresses, and others while they are to go to plain.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::pin::pin;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_wire::{FlowKey, SeqNumber};
use futures_util::future::{Either, select};

use super::knocks::Knocks;
use super::{Live as _, Machine, Plain, Task, or_warn};
use crate::knock::{self, Standing};
use crate::shadow::{Numbers, Shadow};

/// Time between two looks at how far connections have moved on bumps.
const SHOWN_EACH: Duration = Duration::from_millis(50);
/// Time between two looks at which connections are shown in plain.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Time for routers to hear of all that a connection has sent, at the first attempt. Each further one has twice as much, up to
/// [`LONGEST`] times.
const LEVEL_WITHIN: Duration = Duration::from_millis(300);
/// Most by which that time grows: a busy machine, or a long way.
const LONGEST: u32 = 4;
/// Time after which it is shown again where a connection stood that left for plain.
const PART_AGAIN: Duration = Duration::from_millis(60);
/// Time between two looks at what it said.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Shadows of connections, by their ends.
pub type Shadows = BTreeMap<FlowKey, Shadow>;

/// Connections that are shown in plain until the next look at which those are.
struct Shown<P> {
    /// The connections, and by how much each shifts the windows of its far end.
    pairs: BTreeMap<FlowKey, u8>,
    plain: P,
}

/// Shows connections in plain, for good.
pub async fn keep<M: Machine>(m: &M) {
    let mut shown = None;
    loop {
        while m.matched().is_empty() && m.shadows(|shadows| shadows.is_empty()) {
            m.woken(Task::Shadow).await;
        }
        // Woken where connections are moved.
        let (woken, late) = (pin!(m.woken(Task::Shadow)), pin!(m.sleep(LOOK_AGAIN)));
        let over = select(woken, late);
        match look(m, shown.take()).await {
            Ok(Some(some)) => show_until(m, shown.insert(some), over).await,
            // What cannot be shown now may be later.
            Ok(None) | Err(_) => {
                over.await;
            }
        }
    }
}

/// Looks which are on a bump, but for those of which a rule requires that nothing be seen in plain. `before`: those until now,
/// whose sockets stay open if they are the same.
async fn look<M: Machine>(
    m: &M,
    before: Option<Shown<M::Plain>>,
) -> Result<Option<Shown<M::Plain>>, M::Fault> {
    let mut bumped = m.matched();
    bumped.extend(m.shadows(|shadows| Vec::from_iter(shadows.keys().copied())));
    bumped.sort_unstable();
    bumped.dedup();
    m.conns(|conns| bumped.retain(|pair| !m.is_outside(conns.get(pair).place.marked())));
    let lives = m.find(&bumped).await?;
    let may_show = |live: &&M::Live| m.ruling(live, |ruling| ruling.requirement().is_none());
    let shows = lives.values().filter(may_show);
    let shows = shows.map(|live| (live.pair(), m.window_scale(live)));
    let (mut pairs, at) = (shows.collect::<BTreeMap<_, _>>(), m.now());
    // In plain the routers see the connection itself. Where a rule requires the bump it is still known what they saw before.
    m.shadows(|shadows| {
        shadows.retain(|pair, shadow| lives.contains_key(pair) || shadow.is_fresh(at));
        pairs.retain(|pair, _| {
            let (shadow, is_matched) = (shadows.get(pair), m.is_matched(pair));
            shadow.map_or(is_matched, |shadow| shadow.is_due(is_matched, at))
        });
    });
    if pairs.is_empty() {
        return Ok(None);
    }
    if let Some(before) = before.filter(|before| before.pairs == pairs) {
        return Ok(Some(before));
    }
    let plain = m.plain(pairs.keys().copied())?;
    Ok(Some(Shown { pairs, plain }))
}

/// Shows them until then.
async fn show_until<M: Machine, T>(
    m: &M,
    shown: &Shown<M::Plain>,
    mut over: impl Future<Output = T> + Unpin,
) {
    loop {
        // Without the data path nothing moves.
        let Some(conns) = m.carried().await else {
            return;
        };
        let next = m.now() + show(m, shown, &conns);
        let mut heard = match select(&mut over, pin!(shown.plain.hear(Some(next)))).await {
            Either::Left(_) => return,
            Either::Right((heard, _)) => heard,
        };
        // One look at all connections is for all that has arrived: many that move at once are heard at once.
        while let Some(bytes) = heard.take() {
            if let Some((pair, numbers)) = Numbers::read(&bytes) {
                m.shadows(|shadows| {
                    if let Some(shadow) = shadows.get_mut(&pair) {
                        shadow.handle_heard(numbers, m.now());
                    }
                });
            }
            if m.now() < next {
                heard = shown.plain.hear(Some(m.now())).await;
            }
        }
    }
}

/// Shows what is due. Returns the time until the next look.
fn show<M: Machine>(m: &M, shown: &Shown<M::Plain>, conns: &[ConnSnapshot]) -> Duration {
    let mut latest: BTreeMap<FlowKey, &ConnSnapshot> = BTreeMap::new();
    for conn in conns {
        if shown.pairs.contains_key(&conn.tuple) {
            let known = latest.entry(conn.tuple).or_insert(conn);
            if known.last_seen <= conn.last_seen {
                *known = conn;
            }
        }
    }
    let (mut each, at) = (SHOWN_EACH, m.now());
    m.shadows(|shadows| {
        for (pair, conn) in latest {
            let shadow = shadows.entry(pair);
            let shadow = shadow.or_insert_with(|| Shadow::new(None, at));
            if let Some((given, acked)) = conn.entered {
                shadow.handle_left(Numbers { given, acked });
            }
            if shadow.is_asked(at) {
                each = LOOK_EVERY;
            } else if !m.is_matched(&pair) {
                continue;
            }
            let Some(((sent_end, acked), given)) = conn.stands.zip(conn.given) else {
                continue;
            };
            let (stands, scale) = (Numbers { given, acked }, shown.pairs[&pair]);
            if let Some(numbers) = shadow.poll(stands, scale, at) {
                let packet = match stands.may_be_of(sent_end, scale) {
                    true => numbers.packet(&pair),
                    false => numbers.bare_packet(&pair),
                };
                shown.plain.send(&pair, &packet);
            }
        }
    });
    each
}

/// True if routers are shown in plain where a connection stands.
pub fn is_shown<M: Machine>(m: &M, pair: &FlowKey) -> bool {
    m.is_matched(pair) || m.shadows(|shadows| shadows.get(pair).is_some_and(Shadow::is_heard))
}

/// Has routers hear of all of those of these connections that are shown, which are about to go to plain.
pub(super) fn ask<M: Machine>(m: &M, pairs: impl Iterator<Item = FlowKey>) {
    tell(m, pairs.filter(|pair| is_shown(m, pair)), Shadow::ask);
}

/// Tells the shadows of these connections, which begin with that.
pub(super) fn tell<M: Machine>(
    m: &M,
    pairs: impl Iterator<Item = FlowKey>,
    tell: fn(&mut Shadow, Time),
) {
    if !m.keeps_plain_open() {
        return;
    }
    for (pair, at) in pairs.zip(iter::repeat(m.now())) {
        m.shadows(|shadows| {
            let shadow = shadows.entry(pair);
            tell(shadow.or_insert_with(|| Shadow::new(None, at)), at);
        });
    }
    m.wake(Task::Shadow);
}

/// Notes which numbers of the far ends routers know since these knocks.
pub(super) fn note_knocks<M: Machine>(m: &M, knocks: &Knocks) {
    for (pair, theirs) in knocks
        .iter()
        .filter_map(|(pair, it)| Some((pair, it.theirs()?)))
    {
        m.shadows(|shadows| {
            let shadow = shadows.entry(*pair);
            let shadow = shadow.or_insert_with(|| Shadow::new(None, m.now()));
            shadow.handle_knocked(theirs.into());
        });
    }
}

/// Shows in plain where connections stand that go there: what their bumps carried since the knock no router has seen, and it drops
/// what acknowledges that. Nothing is shown of those that have not moved since.
pub(super) async fn part<M: Machine>(m: &M, pairs: &[FlowKey]) {
    let carried = m.carried().await.unwrap_or_default();
    let mut shown = Standing::latest(&carried, pairs);
    shown.retain(|pair, shown| {
        let (sent_end, acked) = shown.stands();
        let is_level = |shadow: &Shadow| shadow.is_level(sent_end) && shadow.has_shown(acked);
        !m.shadows(|shadows| shadows.get(pair).is_some_and(is_level))
    });
    or_warn(m, show_parting(m, shown));
}

/// Sends packets that show where these connections stand, and once more: one may be lost, or be there before the far end's.
fn show_parting<M: Machine>(m: &M, conns: BTreeMap<FlowKey, Standing>) -> Result<(), M::Fault> {
    if conns.is_empty() {
        return Ok(());
    }
    let plain = m.plain(conns.keys().copied())?;
    let packets = conns.into_iter().flat_map(|(pair, shown)| {
        let seen = m.shadows(|shadows| shadows.get(&pair).and_then(Shadow::seen));
        let packets = knock::partings(&pair, shown, seen).into_iter();
        packets.map(move |packet| (pair, packet))
    });
    let packets = Vec::from_iter(packets);
    let send = |plain: &M::Plain, packets: &[(FlowKey, Vec<u8>)]| {
        { packets.iter() }.for_each(|(pair, packet)| plain.send(pair, packet));
    };
    send(&plain, &packets);
    m.spawn(async move {
        let again = plain.now() + PART_AGAIN;
        while plain.hear(Some(again)).await.is_some() {}
        send(&plain, &packets);
    });
    Ok(())
}

/// Has connections fall silent that are about to go to plain, and waits until the peer has shown there that it has all that they
/// have sent: then routers on the way have seen it, too. Returns those that are [`behind`] even so, after so many `attempts` before
/// this one. Those that are shown take nothing more by their bumps if they are `leading`: their peers are silent already.
pub(super) async fn silence<M: Machine>(
    m: &M,
    lives: &[M::Live],
    attempts: u32,
    leading: bool,
) -> BTreeSet<FlowKey> {
    let leading = lives.iter().filter(|_| leading).map(|live| live.pair());
    let refusing = leading.filter(|pair| is_shown(m, pair)).collect();
    m.silence(lives, &refusing).await;
    let pairs: Vec<FlowKey> = lives.iter().map(|live| live.pair()).collect();
    let outrun = outrun(m, &pairs).await;
    ask(m, pairs.iter().copied());
    tell(m, outrun.iter().copied(), Shadow::ask);
    part(m, &pairs).await;
    let begin = m.now();
    let end = begin + LEVEL_WITHIN * (1 << attempts).min(LONGEST);
    while m.now() < end {
        let is_heard = outrun.iter().all(|pair| is_shown(m, pair));
        if is_heard && behind(m, &pairs, Time::ZERO).await.is_empty() {
            return BTreeSet::new();
        }
        m.sleep(LOOK_EVERY).await;
    }
    behind(m, &pairs, begin).await
}

/// Connections of these of which more went by their bumps since the knock than a firewall takes at once: it would drop what
/// [parts](part), so they are shown from where it saw them on.
pub(super) async fn outrun<M: Machine>(m: &M, pairs: &[FlowKey]) -> BTreeSet<FlowKey> {
    if !m.keeps_plain_open() {
        return BTreeSet::new();
    }
    let carried = m.carried().await.unwrap_or_default();
    let stands = Standing::latest(&carried, pairs).into_iter();
    let is_outrun = |(pair, it): &(FlowKey, Standing)| {
        m.shadows(|shadows| {
            { shadows.get(pair) }.is_some_and(|shadow| shadow.is_outrun(it.stands()))
        })
    };
    stands.filter(is_outrun).map(|(pair, _)| pair).collect()
}

/// Has the shadows of these connections answered, which the peer shows where they [outran](outrun) the routers.
pub(super) fn listen<M: Machine>(m: &M, pairs: impl Iterator<Item = FlowKey>) {
    tell(m, pairs, Shadow::listen);
}

/// Connections of these of which the peer has not shown in plain that it has all that they sent: a router on the way that has not
/// seen that drops, or answers with a reset, what acknowledges it. Those that both ends call alike count only if the peer has shown
/// something `since` then: it does not keep them up. None where plain is not kept open, and none that is in plain already.
pub(super) async fn behind<M: Machine>(m: &M, pairs: &[FlowKey], since: Time) -> BTreeSet<FlowKey> {
    let is_bumped = |pair: &FlowKey| m.conns(|conns| !m.is_outside(conns.get(pair).place.marked()));
    let is_shown = |pair: &&FlowKey| is_bumped(pair) && is_shown(m, pair);
    let shown: BTreeSet<FlowKey> = pairs.iter().filter(is_shown).copied().collect();
    if shown.is_empty() || !m.keeps_plain_open() {
        return BTreeSet::new();
    }
    // Without the data path nothing is under way.
    let conns = m.carried().await.unwrap_or_default();
    let is_behind = |conn: &&ConnSnapshot| {
        let is_kept_up = m.is_matched(&conn.tuple);
        // Bytes that the other kernel lacks are sent again in plain, where a firewall sees them. A router that translates may reset what
        // acknowledges them before.
        let all = match is_kept_up {
            true => conn.stands.map(|(sent, _)| sent),
            false => conn.given,
        };
        let is_behind = |(shadow, all): (&Shadow, SeqNumber)| {
            !shadow.is_level(all) && (is_kept_up || shadow.is_heard_since(since))
        };
        let behind = |shadows: &mut Shadows| {
            let shadow = shadows.get(&conn.tuple).zip(all);
            shadow.is_some_and(is_behind)
        };
        shown.contains(&conn.tuple) && m.shadows(behind)
    };
    let behind = conns.iter().filter(is_behind);
    behind.map(|conn| conn.tuple).collect()
}
