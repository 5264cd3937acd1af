//! Subflows of MPTCP connections. One that goes by a bump while another one goes in plain shows in plain what the bump
//! hides, so all subflows of a connection move, or none.

use std::collections::{BTreeMap, BTreeSet};

use dibs_policy::sockets;
use dibs_settings::BumpId;
use dibs_switch::knock::Refusal;
use dibs_wire::FlowKey;

use crate::host::Host;
use crate::host::live::Live;
use crate::host::log::or_warn;

/// Why connections cannot move.
pub(crate) type Refused = BTreeMap<FlowKey, String>;

/// Connections of `all` that are meant, or are subflows of a connection of which one is.
pub(crate) fn united(all: &[Live], meant: impl Fn(&Live) -> bool) -> Vec<&Live> {
    let is_meant = |live: &&Live| meant(live);
    let tokens: BTreeSet<u32> = { all.iter().filter(is_meant) }
        .filter_map(|live| live.mptcp)
        .collect();
    let is_united = |live: &Live| live.mptcp.is_some_and(|token| tokens.contains(&token));
    let chosen = all.iter().filter(|live| meant(live) || is_united(live));
    chosen.collect()
}

/// Has none of a connection's subflows move where one cannot.
pub(crate) fn spread(lives: &[Live], refused: &mut Refused) {
    let mut whys: BTreeMap<u32, String> = BTreeMap::new();
    for live in lives {
        if let Some((token, why)) = live.mptcp.zip(refused.get(&live.pair)) {
            whys.entry(token).or_insert_with(|| {
                format!(
                    "a subflow of the same MPTCP connection ({}) cannot move: {why}",
                    live.pair
                )
            });
        }
    }
    for live in lives {
        if let Some(why) = live.mptcp.and_then(|token| whys.get(&token)) {
            refused.entry(live.pair).or_insert_with(|| why.clone());
        }
    }
}

/// The same, of those that plain does not carry.
pub(crate) fn spread_refusals(
    lives: &[Live],
    mut refusals: BTreeMap<FlowKey, Refusal>,
) -> BTreeMap<FlowKey, Refusal> {
    let of_subflow = |live: &Live| Some((live.mptcp?, *refusals.get(&live.pair)?));
    let whys: BTreeMap<u32, Refusal> = lives.iter().filter_map(of_subflow).collect();
    for live in lives {
        if let Some(why) = live.mptcp.and_then(|token| whys.get(&token)) {
            refusals.entry(live.pair).or_insert(*why);
        }
    }
    refusals
}

/// Why connections cannot go to a bump of which other subflows are beyond the reach of bumps: bound to a device, or to
/// hosts that are no peer's.
pub(crate) async fn out_of_reach(host: &Host, lives: &[Live]) -> anyhow::Result<Refused> {
    let tokens: BTreeSet<u32> = lives.iter().filter_map(|live| live.mptcp).collect();
    if tokens.is_empty() {
        return Ok(Refused::new());
    }
    let is_meant = |token: u32| tokens.contains(&token);
    let beyond = sockets::list(|socket| {
        let token = socket.mptcp.filter(|token| is_meant(*token))?;
        let subflow = format!("a subflow of the same MPTCP connection ({})", socket.key);
        if socket.bound_device != 0 {
            return Some((
                token,
                format!("{subflow} is bound to a device and cannot be steered"),
            ));
        }
        let is_to_peer = host.peer_of(socket.key.dst).is_some();
        (!is_to_peer).then(|| (token, format!("{subflow} goes to a host that is no peer's")))
    });
    let beyond: BTreeMap<u32, String> = beyond.await?.into_iter().collect();
    let why = |live: &Live| Some((live.pair, beyond.get(&live.mptcp?)?.clone()));
    Ok(lives.iter().filter_map(why).collect())
}

/// Connections of these that can be steered there: of an MPTCP connection all subflows or none.
pub(crate) async fn steerable(host: &Host, lives: &[Live], bump: Option<BumpId>) -> Vec<Live> {
    let mut refused = match bump {
        None => Refused::new(),
        Some(_) => or_warn(out_of_reach(host, lives).await).unwrap_or_default(),
    };
    let bound = lives.iter().filter(|live| live.bound);
    let why = |live: &Live| (live.pair, "its socket is bound to a device".to_owned());
    refused.extend(bound.map(why));
    spread(lives, &mut refused);
    for (pair, why) in &refused {
        tracing::debug!(?pair, "rules do not move a connection: {why}");
    }
    let is_able = |live: &&Live| !refused.contains_key(&live.pair);
    lives.iter().filter(is_able).copied().collect()
}

/// Connections that moved while another subflow of the same connection did not, by what the peer or the kernel
/// said.
pub(crate) fn torn(moved: &[(Live, Result<(), String>)]) -> Vec<(Live, String)> {
    let mut refused = Refused::new();
    let failed = moved.iter().filter_map(|(live, outcome)| {
        let why = outcome.as_ref().err()?;
        Some((live.pair, why.clone()))
    });
    refused.extend(failed);
    let lives: Vec<Live> = moved.iter().map(|(live, _)| *live).collect();
    spread(&lives, &mut refused);
    let is_torn = |(live, outcome): &(Live, Result<(), String>)| {
        let why = refused.get(&live.pair).filter(|_| outcome.is_ok())?;
        Some((*live, why.clone()))
    };
    moved.iter().filter_map(is_torn).collect()
}

#[cfg(test)]
mod tests {
    use dibs_policy::sockets::TcpCounts;
    use dibs_switch::conns::Socket;

    use super::*;

    fn live(port: u16, mptcp: Option<u32>) -> Live {
        Live {
            pair: FlowKey::tcp(([10, 0, 1, 1], port), ([10, 0, 1, 2], 80)),
            peer: 0,
            socket: Socket(port.into()),
            uid: Some(0),
            inode: 1,
            bound: false,
            mptcp,
            over: false,
            established: true,
            opening: false,
            counts: TcpCounts::default(),
            mark: 0,
        }
    }

    #[test]
    fn subflows_are_meant_and_refused_together() {
        let lives = [
            live(1, Some(7)),
            live(2, Some(7)),
            live(3, Some(8)),
            live(4, None),
        ];
        let ports =
            |lives: &[&Live]| -> Vec<u16> { lives.iter().map(|live| live.pair.sport).collect() };
        let port = |port| move |live: &Live| live.pair.sport == port;
        assert_eq!(ports(&united(&lives, port(1))), [1, 2]);
        assert_eq!(ports(&united(&lives, port(4))), [4]);

        let mut refused = Refused::from([
            (lives[0].pair, "it is bound".to_owned()),
            (lives[3].pair, "it has ended".to_owned()),
        ]);
        spread(&lives, &mut refused);
        assert_eq!(refused[&lives[0].pair], "it is bound");
        assert!(refused[&lives[1].pair].contains("10.0.1.1:1") && refused.len() == 3);

        let failed = |live: Live| (live, Err("no".to_owned()));
        let moved = [
            (lives[0], Ok(())),
            failed(lives[1]),
            (lives[2], Ok(())),
            failed(lives[3]),
        ];
        let torn = torn(&moved);
        let torn: Vec<&Live> = torn.iter().map(|(live, _)| live).collect();
        assert_eq!(ports(&torn), [1]);
    }
}
