//! Proof that plain carries connections before they leave their bumps for plain, here and for peers that ask.

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::time::Duration;

use dibs_core::Time;
use futures_util::future::{Either, select, try_join_all};

use super::rules::Kept;
use super::{Live as _, Machine, News, Plain, ROUND, asks, shadows, stands_on, update};
use crate::conns::Meant;
use crate::knock::{self, Knock, Numbers, Refusal};
use crate::messages::{Body, Named, Outcome, Unanswered};
use crate::shadow::{self, Shadow};

/// Time after which a firewall may have lost track of a connection for which a knock was not heard.
const CATCH_UP_AFTER: Duration = Duration::from_millis(100);

/// Acknowledgements that a peer sends in plain, by the connection as this host sends, and whether that is on a bump here.
type Heard = BTreeMap<FlowKey, (Numbers, bool)>;

/// The knocks of some connections that go on together.
pub(super) type Knocks = BTreeMap<FlowKey, Knock>;

/// Finds the connections of these that cannot leave their bumps for plain, and why. Those that are on no bump, and those on
/// another program's device, are not looked at.
///
/// # Errors
/// The system cannot find out.
pub async fn refusals<M: Machine>(m: &M, lives: &[M::Live]) -> Result<Kept, M::Fault> {
    let mut by_peer: BTreeMap<usize, Vec<M::Live>> = BTreeMap::new();
    for live in lives.iter().filter(|live| !live.is_over()) {
        if !m.is_outside(stands_on(m, live)) {
            by_peer.entry(live.peer()).or_default().push(*live);
        }
    }
    let asked = by_peer.iter().map(async |(peer, lives)| {
        let mut refused = Kept::new();
        let mut answers_none = false;
        for lives in lives.chunks(ROUND) {
            if answers_none {
                let why = Refusal::Peer(Err(Unanswered::NotAsked));
                refused.extend(lives.iter().map(|live| (live.pair(), why)));
                continue;
            }
            let some = knock(m, *peer, lives).await?;
            let heard = lives.iter().map(|live| live.pair());
            note_plain(m, heard.filter(|pair| !some.contains_key(pair)));
            let is_silent = |why: &Refusal| *why == Refusal::Peer(Err(Unanswered::Silent));
            answers_none = some.len() == lives.len() && some.values().all(is_silent);
            refused.extend(some);
        }
        Ok(refused)
    });
    let asked = try_join_all(asked).await?;
    Ok(asked.into_iter().flatten().collect())
}

/// Notes that plain carries these connections.
fn note_plain<M: Machine>(m: &M, pairs: impl Iterator<Item = FlowKey>) {
    pairs.for_each(|pair| update(m, &pair, |conn| conn.place.note_plain(m.now())));
}

/// Answers a peer that knocks: whether the acknowledgements arrive that it sends in plain. This host sends its own.
pub async fn answer<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[(Named, Numbers)],
) -> Vec<(Outcome, u64)> {
    let failed = (Outcome::Failed, 0);
    let answered = async {
        let pairs: Vec<FlowKey> = { conns.iter() }
            .map(|(named, _)| named.pair.reversed())
            .collect();
        let (lives, tracked) = m.look_up(&pairs).await?;
        let judge = |named: &Named| {
            let live = lives.get(&named.pair.reversed());
            let Some(live) = live.filter(|live| live.peer() == peer) else {
                return Some((Outcome::NoConnection, 0));
            };
            let socket = live.meant().socket;
            if socket != named.socket {
                return Some((Outcome::OtherSocket, socket.0.into()));
            }
            m.lacks_plain(&live.pair()).map(|_| (Outcome::NotHeard, 0))
        };
        let judged: Vec<_> = conns.iter().map(|(named, _)| judge(named)).collect();
        let meant = { judged.iter() }.zip(&pairs).zip(conns);
        let meant = meant.filter(|((judged, _), _)| judged.is_none());
        let meant = meant.map(|((_, pair), (_, theirs))| {
            let is_bumped = tracked.bump(pair).is_some();
            (*pair, (*theirs, is_bumped))
        });
        let replies = hear(m, &meant.collect()).await?;
        let heard = { replies.iter() }.filter(|(_, (outcome, _))| *outcome == Outcome::Done);
        note_plain(m, heard.map(|(pair, _)| *pair));
        let reply = |pair: &FlowKey| replies.get(pair).copied().unwrap_or(failed);
        let answers = judged.into_iter().zip(&pairs);
        let answers = answers.map(|(judged, pair)| judged.unwrap_or_else(|| reply(pair)));
        Ok::<_, M::Fault>(answers.collect())
    };
    answered.await.unwrap_or_else(|fault| {
        let why =
            format!("cannot find out whether the network carries connections in plain: {fault:#}");
        m.tell(News::Fault(&why));
        vec![failed; conns.len()]
    })
}

/// Knocks at a peer, for up to [`ROUND`] connections. Returns those that plain does not carry. It knocks again as long as routers get
/// to know what went by the bump.
async fn knock<M: Machine>(m: &M, peer: usize, lives: &[M::Live]) -> Result<Kept, M::Fault> {
    let begin = m.now();
    let mut refused = Kept::new();
    let mut meant = lives.to_vec();
    loop {
        let since = m.now();
        refused.extend(knock_once(m, peer, &meant).await?);
        m.shadows(|shadows| {
            meant.retain(|live| {
                let pair = live.pair();
                let not_heard = Refusal::Peer(Ok((Outcome::NotHeard, 0)));
                let why = refused.get_mut(&pair).filter(|why| **why == not_heard);
                let behind = shadows.get(&pair).and_then(|shadow| shadow.behind(since));
                let Some((why, bytes)) = why.zip(behind) else {
                    return false;
                };
                if bytes > 0 {
                    *why = Refusal::Behind(bytes);
                }
                true
            });
        });
        if meant.is_empty() || m.now().since(begin) >= shadow::CATCH_UP_WITHIN {
            return Ok(refused);
        }
        for live in &meant {
            refused.remove(&live.pair());
        }
    }
}

async fn knock_once<M: Machine>(m: &M, peer: usize, lives: &[M::Live]) -> Result<Kept, M::Fault> {
    let pairs = lives.iter().map(|live| live.pair());
    let lacking = pairs
        .clone()
        .filter_map(|pair| Some((pair, m.lacks_plain(&pair)?)));
    let mut refused: Kept = lacking.collect();
    let pairs: Vec<FlowKey> = pairs.filter(|pair| !refused.contains_key(pair)).collect();
    let numbers = m.numbers(&pairs).await?;
    let unknown = pairs.iter().filter(|pair| !numbers.contains_key(pair));
    refused.extend(unknown.map(|pair| (*pair, Refusal::Unknown)));
    let known = lives
        .iter()
        .filter(|live| numbers.contains_key(&live.pair()));
    let meant: Vec<Meant> = known.map(|live| live.meant()).collect();
    if meant.is_empty() {
        return Ok(refused);
    }
    let plain = m.plain(meant.iter().map(|conn| conn.pair))?;
    shadows::ask(m, meant.iter().map(|conn| conn.pair));
    let begin = m.now();
    let mut late = Late(Some(begin));
    let start = |conn: &Meant| (conn.pair, Knock::ask(begin, numbers[&conn.pair]));
    let mut knocks: Knocks = meant.iter().map(start).collect();
    let body = |named: &[(usize, Named)]| {
        let numbers = |index: usize| numbers[&meant[index].pair].numbers;
        let conns = named.iter().map(|(index, named)| (*named, numbers(*index)));
        Body::Knock(conns.collect())
    };
    let mut asked = pin!(asks::ask_about(m, peer, &meant, body));
    let mut is_answered = false;
    loop {
        send_due(&plain, &mut knocks);
        let at = m.now();
        let unheard = knocks
            .iter()
            .filter(|(_, knock)| knock.outcome(at).is_none());
        let unheard: Vec<FlowKey> = unheard.map(|(pair, _)| *pair).collect();
        if unheard.is_empty() {
            break;
        }
        late.show(m, unheard.into_iter());
        let due = due(&knocks);
        if is_answered {
            hear_one(&mut knocks, plain.hear(due).await, m.now());
            continue;
        }
        match select(&mut asked, pin!(plain.hear(due))).await {
            Either::Left((answers, _)) => {
                is_answered = true;
                for (conn, answer) in meant.iter().zip(answers) {
                    let knock = knocks.get_mut(&conn.pair);
                    knock
                        .expect("each that is asked about knocks")
                        .handle_answer(answer);
                }
            }
            Either::Right((heard, _)) => hear_one(&mut knocks, heard, m.now()),
        }
    }
    let at = m.now();
    shadows::note_knocks(m, &knocks);
    for (pair, knock) in knocks {
        match knock.outcome(at) {
            Some(Ok((Outcome::Done, _))) | None => {}
            Some(answer) => drop(refused.insert(pair, Refusal::Peer(answer))),
        }
    }
    Ok(refused)
}

/// Answers to a peer that sends these acknowledgements; none for those of which the kernel here does not say where they stand.
async fn hear<M: Machine>(
    m: &M,
    heard: &Heard,
) -> Result<HashMap<FlowKey, (Outcome, u64)>, M::Fault> {
    let mut replies = HashMap::new();
    if heard.is_empty() {
        return Ok(replies);
    }
    let plain = m.plain(heard.keys().copied())?;
    shadows::ask(m, heard.keys().copied());
    let bumped = heard.iter().filter(|(_, (_, is_bumped))| *is_bumped);
    let bumped: Vec<FlowKey> = bumped.map(|(pair, _)| *pair).collect();
    shadows::tell(m, bumped.iter().copied(), Shadow::handle_knock);
    let numbers = m.numbers(&bumped).await?;
    let begin = m.now();
    let mut late = Late(Some(begin));
    let mut knocks = Knocks::new();
    for (pair, (theirs, is_bumped)) in heard {
        let own = numbers.get(pair).copied();
        // What is in plain here already has to be heard, and not to be proved.
        if own.is_some() || !is_bumped {
            knocks.insert(*pair, Knock::answer(begin, own, *theirs));
        }
    }
    loop {
        send_due(&plain, &mut knocks);
        let at = m.now();
        let replied = knocks.iter_mut();
        replies.extend(replied.filter_map(|(pair, knock)| Some((*pair, knock.reply(at)?))));
        if replies.len() == knocks.len() {
            break;
        }
        let is_unheard = |pair: &FlowKey| numbers.contains_key(pair) && !replies.contains_key(pair);
        late.show(m, knocks.keys().copied().filter(is_unheard));
        let heard = plain.hear(due(&knocks)).await;
        hear_one(&mut knocks, heard, m.now());
    }
    shadows::note_knocks(m, &knocks);
    // The answer is not to wait for the last repetitions.
    m.spawn(async move {
        while let Some(due) = due(&knocks) {
            let heard = plain.hear(Some(due)).await;
            hear_one(&mut knocks, heard, plain.now());
            send_due(&plain, &mut knocks);
        }
    });
    Ok(replies)
}

/// Time at which knocks began, until it is late enough to show routers what went by the bump.
struct Late(Option<Time>);

impl Late {
    fn show<M: Machine>(&mut self, m: &M, unheard: impl Iterator<Item = FlowKey>) {
        let is_late = |begin: &mut Time| m.now().since(*begin) >= CATCH_UP_AFTER;
        if self.0.take_if(is_late).is_some() {
            shadows::tell(m, unheard, Shadow::ask);
        }
    }
}

/// Time at which one of these has something to do.
fn due(knocks: &Knocks) -> Option<Time> {
    knocks.values().filter_map(Knock::due).min()
}

/// Sends what is due.
fn send_due(plain: &impl Plain, knocks: &mut Knocks) {
    let now = plain.now();
    for (pair, knock) in knocks {
        while let Some(own) = knock.poll_send(now) {
            let packets = knock::packets(pair, own);
            packets.iter().for_each(|packet| plain.send(pair, packet));
        }
    }
}

/// Takes a packet that arrived in plain, if one did.
fn hear_one(knocks: &mut Knocks, packet: Option<Vec<u8>>, now: Time) {
    let heard = packet.and_then(|bytes| knock::read(&bytes));
    if let Some((pair, numbers)) = heard
        && let Some(knock) = knocks.get_mut(&pair)
    {
        knock.handle_heard(numbers, now);
    }
}
