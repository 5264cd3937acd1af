//! Frames that belong to one path: joining, probes, acknowledgements.

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};

use super::context::SendCx;
use super::datagram::{Asks, Seal};
use crate::node::out::{Out, Source};
use crate::node::paths::Link;
use crate::session::{CLEAR_HEADER_LEN, OVERHEAD};
use crate::time::Time;

/// Length of an acknowledgement frame's content, at most.
const ACK_BYTES: usize = 300;
/// Length of the whole frame, at most.
pub(super) const MAX_ACK: usize = ACK_BYTES + frame::ACK_OVERHEAD;

/// Sends them by the first path that has any. An acknowledgement goes along with what goes by the path at `carrier`
/// anyhow.
pub(super) fn send(cx: &mut SendCx<'_>, carrier: Option<usize>) -> Option<Out> {
    for at in 0..cx.paths.len() {
        let link = &mut cx.paths[at];
        if !cx.shared.setup.local[link.local].is_usable() {
            continue;
        }
        if let Some((to, challenge)) = link.poll_challenge(cx.now) {
            let mut block = [0; 16];
            let mut w = Writer::new(&mut block);
            frame::encode(&Frame::PathChallenge { challenge }, &mut w);
            let len = w.len();
            let out = cx.send_block(at, &block[..len], Asks::Nothing)?;
            return Some(Out {
                to,
                ect: false,
                ..out
            });
        }
        if link.is_open()
            && let Some(size) = link.path.poll_mtu_probe(cx.now)
        {
            return send_mtu_probe(cx, at, size);
        }
        let ack = link.is_open() && link.path.ack_due(cx.now) && carrier != Some(at);
        if !link.has_frames() && !ack {
            continue;
        }
        if !link.spend(OVERHEAD + link.frames.len()) {
            continue;
        }
        let mut block = std::mem::take(&mut link.frames);
        if link.is_open() {
            put_ack(cx.now, link, &mut block);
        }
        let mut asks = Asks::Nothing;
        if link.take_probe() {
            block.push(link.ping(&cx.shared.setup));
            asks = Asks::Ack;
        }
        if block.is_empty() {
            cx.paths[at].frames = block;
            continue;
        }
        let out = cx.send_block(at, &block, asks);
        block.clear();
        cx.paths[at].frames = block;
        return out;
    }
    None
}

fn send_mtu_probe(cx: &mut SendCx<'_>, at: usize, size: u16) -> Option<Out> {
    let link = &mut cx.paths[at];
    let len = usize::from(size);
    let ping = link.ping(&cx.shared.setup);
    let datagram = &mut cx.shared.scratch.datagrams;
    datagram.clear();
    // A ping, and padding, which is zero.
    datagram.resize(len, 0);
    datagram[CLEAR_HEADER_LEN] = ping;
    let number = (link.id, link.path.on_mtu_probe_sent(cx.now, size));
    let sealed = cx
        .sealer
        .seal_numbered(number, datagram, len - OVERHEAD, Seal::Headers);
    sealed.then(|| Out::by(link, len, Source::Scratch))
}

/// Appends an acknowledgement frame, if there is anything to acknowledge.
pub(super) fn put_ack(now: Time, link: &mut Link, block: &mut Vec<u8>) {
    let start = block.len();
    block.extend_from_slice(&[frame::ACK, 0, 0]);
    if link.path.encode_ack(now, ACK_BYTES, block) {
        let len = (block.len() - start - 3) as u16;
        block[start + 1..start + 3].copy_from_slice(&len.to_be_bytes());
    } else {
        block.truncate(start);
    }
}
