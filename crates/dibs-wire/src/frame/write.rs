//! Frames of all kinds to bytes.

use core::net::IpAddr;

use super::{
    ACK, CONTROL, EPOCH_BROKEN, FLOW_UNKNOWN, FRAGMENT, Frame, OPAQUE, PATH_ACCEPT, PATH_CHALLENGE,
    PATH_CONFIRM, PATH_JOIN, PATH_RESPONSE, PING, PING_SPENT, SHARE, SHARE_OF_SEGMENTS,
};
use crate::bytes::Writer;

/// Appends a frame.
///
/// # Panics
/// If it does not fit `w`, or a byte string exceeds 65535 bytes.
pub fn encode(frame: &Frame<'_>, w: &mut Writer<'_>) {
    let put_bytes = |w: &mut Writer<'_>, bytes: &[u8]| {
        w.u16(u16::try_from(bytes.len()).expect("a frame fits a datagram"));
        w.put(bytes);
    };
    match *frame {
        Frame::Ping => w.u8(PING),
        Frame::PingSpent => w.u8(PING_SPENT),
        Frame::Ack(ranges) => {
            w.u8(ACK);
            put_bytes(w, ranges);
        }
        Frame::Chunk(ref chunk) => chunk.encode(w),
        Frame::Segment(ref segment) => segment.encode(w),
        Frame::Opaque { bump, packet } => {
            w.u8(OPAQUE);
            w.u8(bump);
            put_bytes(w, packet);
        }
        Frame::Fragment {
            id,
            at,
            total,
            header,
            bytes,
        } => {
            w.u8(FRAGMENT);
            w.u32(id);
            w.u32(at);
            w.u32(total);
            w.u16(header);
            put_bytes(w, bytes);
        }
        Frame::Share(share) => {
            w.u8(match share.fleeting {
                true => SHARE_OF_SEGMENTS,
                false => SHARE,
            });
            w.u8(share.bump);
            w.u32(share.set);
            w.put(&[share.index, share.needed, share.shares]);
        }
        Frame::Control { id, bytes } => {
            w.u8(CONTROL);
            w.u32(id);
            put_bytes(w, bytes);
        }
        Frame::FlowUnknown { flow, incarnation } => {
            w.u8(FLOW_UNKNOWN);
            w.u32(flow.get());
            w.u16(incarnation);
        }
        Frame::EpochBroken {
            flow,
            incarnation,
            epoch,
        } => {
            w.u8(EPOCH_BROKEN);
            w.u32(flow.get());
            w.u16(incarnation);
            w.u32(epoch);
        }
        Frame::PathJoin { nonce, trusted, to } => {
            w.u8(PATH_JOIN);
            w.put(&nonce);
            w.u8(u8::from(trusted));
            let to = match to {
                IpAddr::V4(to) => to.to_ipv6_mapped(),
                IpAddr::V6(to) => to,
            };
            w.put(&to.octets());
        }
        Frame::PathAccept {
            nonce,
            challenge,
            trusted,
        } => {
            w.u8(PATH_ACCEPT);
            w.put(&nonce);
            w.put(&challenge);
            w.u8(u8::from(trusted));
        }
        Frame::PathConfirm { challenge } => {
            w.u8(PATH_CONFIRM);
            w.put(&challenge);
        }
        Frame::PathChallenge { challenge } => {
            w.u8(PATH_CHALLENGE);
            w.put(&challenge);
        }
        Frame::PathResponse { challenge } => {
            w.u8(PATH_RESPONSE);
            w.put(&challenge);
        }
    }
}
