//! Packets that are not cut.

use std::sync::Arc;

use super::carrier::{Carrier, SHARE_OVERHEAD};
use super::context::SendCx;
use super::datagram::{Asks, pad};
use super::shares::Shares;
use crate::chunk::Placement;
use crate::node::opaque::{OpaqueQueue, OpaqueQueues};
use crate::node::out::Out;
use crate::node::paths::{Avoid, Wanted};
use crate::session::OVERHEAD;

/// Sends the first, or its next piece: by a trusted path unless its bump encrypts it, or splits it.
pub(super) fn send(
    cx: &mut SendCx<'_>,
    queues: &mut OpaqueQueues,
    shares: &mut Shares,
) -> Option<Out> {
    send_by(cx, Placement::TrustedOnly, &mut queues.plain, shares)
        .or_else(|| send_by(cx, Placement::Any, &mut queues.sealed, shares))
        .or_else(|| send_by(cx, Placement::Any, &mut queues.split, shares))
}

fn send_by(
    cx: &mut SendCx<'_>,
    placement: Placement,
    queue: &mut OpaqueQueue,
    shares: &mut Shares,
) -> Option<Out> {
    let head = queue.head()?;
    let bumps = Arc::clone(&cx.shared.setup.bumps);
    let bump = bumps.of(head.bump);
    let left = head.packet.len() - head.at;
    let carrier = match bump.split() {
        Some(split) => shares.bundle_for(cx, split, left + SHARE_OVERHEAD)?,
        None => {
            let wanted = Wanted::alone(placement, left + OVERHEAD, Avoid::Nothing);
            let (link, budget) = cx.choose(&wanted)?;
            Carrier::link(cx.paths, link, budget)
        }
    };
    let room = carrier.room();
    let (mut block, taken) = head.block(room);
    queue.consume(taken);
    if bump.is_padded() {
        pad(&mut block, room);
    }
    match carrier.split {
        Some(split) => {
            let bump = (bump.number, split);
            shares.send_block(cx, bump, &carrier.links, &block, None, false)
        }
        None => cx.send_block(carrier.links[0], &block, Asks::Ack),
    }
}
