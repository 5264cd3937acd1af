//! Messages between the daemons: reliable, by trusted paths if there are any.

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};

use super::context::SendCx;
use super::datagram::Asks;
use crate::chunk::{Content, Message};
use crate::in_flight::Pending;
use crate::node::messages::Messages;
use crate::node::out::Out;
use crate::node::paths::Kind;
use crate::slab::Key;

/// Sends the next one.
pub(super) fn send(cx: &mut SendCx<'_>, messages: &mut Messages) -> Option<Out> {
    if !messages.is_due(cx.now, cx.in_flight.messages()) {
        return None;
    }
    let at = cx
        .paths
        .quickest(&cx.shared.setup, cx.message_placement(), Kind::Message)?;
    let key = cx.in_flight.add_message(messages.pop()?);
    transmit(cx, at, key)
}

/// Sends one that is in flight, by the path at `at`.
pub(super) fn transmit(cx: &mut SendCx<'_>, at: usize, key: Key) -> Option<Out> {
    let Some(Pending {
        content: Content::Control(message),
        ..
    }) = cx.in_flight.get(key)
    else {
        return None;
    };
    let Message { id, bytes, .. } = cx.in_flight.message(*message);
    let mut block = vec![0; frame::CONTROL_OVERHEAD + bytes.len()];
    frame::encode(
        &Frame::Control { id: *id, bytes },
        &mut Writer::new(&mut block),
    );
    cx.send_block(at, &block, Asks::AckOf(key))
}
