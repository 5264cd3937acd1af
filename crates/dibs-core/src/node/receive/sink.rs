//! Where the restored bytes of a connection go.

use dibs_wire::SeqNumber;
use dibs_wire::frame::{self, TcpFields};
use dibs_wire::packet::{FlowKey, flags};
use smallvec::SmallVec;

use crate::buffer::Pool;
use crate::flow::ack_floor::AckFloor;
use crate::flow::conn::{Conn, Incoming, IncomingDecoders};
use crate::flow::echo_filter::{self, EchoFilter};
use crate::flow::inject::{Injector, Template};
use crate::flow::tsval_floor::TsvalFloor;
use crate::flow::window_clamp::WindowClamp;
use crate::node::shared::Shared;
use crate::slab::Key;
use crate::stream::rx::{RxStream, Sink};
use crate::time::Time;

/// The incoming stream of a connection, how it is restored, and where its bytes go.
pub(super) fn incoming<'a>(
    now: Time,
    shared: &'a mut Shared,
    key: Key,
    (conn, tuple, floor): (&'a mut Conn, FlowKey, &'a mut TsvalFloor),
) -> Option<(&'a mut RxStream, IncomingDecoders<'a>, ConnSink<'a>)> {
    let inc = conn.inc.as_mut()?;
    let template = inc.template(tuple, conn.bump);
    let Incoming {
        flow,
        incarnation,
        base,
        secrets,
        stream,
        top,
        ack_floor,
        ..
    } = inc;
    let sink = ConnSink {
        injector: &mut shared.injector,
        pool: &mut shared.pool,
        owner: key.to_u64(),
        template,
        now,
        echo_filter: &mut conn.echo_filter,
        ack_floor,
        sent_end: conn.sent_end,
        base: *base,
        floor,
        clamp: conn.clamp.as_deref_mut(),
        refuses: conn.refuses,
        is_refused: false,
        top,
        received: &mut conn.stats.bytes_received,
        last: 0,
    };
    let bump = shared.setup.bumps.of(conn.bump);
    let decoders = IncomingDecoders::new(bump, secrets, *flow, *incarnation);
    Some((stream, decoders, sink))
}

/// Hands restored bytes of one connection to the injector.
pub(super) struct ConnSink<'a> {
    injector: &'a mut Injector,
    pool: &'a mut Pool,
    owner: u64,
    template: Template,
    now: Time,
    echo_filter: &'a mut Option<Box<EchoFilter>>,
    ack_floor: &'a mut AckFloor,
    sent_end: Option<SeqNumber>,
    base: SeqNumber,
    floor: &'a mut TsvalFloor,
    clamp: Option<&'a mut WindowClamp>,
    /// The kernel is given no data.
    refuses: bool,
    /// The last piece is kept from it.
    is_refused: bool,
    top: &'a mut u64,
    received: &'a mut u64,
    last: u64,
}

impl Sink for ConnSink<'_> {
    fn room(&mut self, offset: u64, tcp: &TcpFields<'_>, len: usize) -> &mut [u8] {
        self.last = len as u64;
        self.is_refused = self.refuses && tcp.flags & flags::RST == 0;
        if !self.is_refused {
            *self.top = (*self.top).max(offset + len as u64);
        }
        let seq = self
            .base
            .add(offset.wrapping_sub(frame::BASE_OFFSET) as u32);
        let (mut raised, mut scratch) = (SmallVec::new(), SmallVec::new());
        let mut changed;
        let late = self.ack_floor.hear(tcp, self.sent_end);
        let tcp = match (late || self.echo_filter.is_some(), &mut self.clamp) {
            // As nearly always: nothing to copy.
            (false, None) => tcp,
            (_, clamp) => {
                changed = *tcp;
                if late {
                    self.ack_floor.raise(&mut changed, &mut raised);
                }
                echo_filter::adapt(self.echo_filter, self.now, &mut changed, &mut scratch);
                if let Some(clamp) = clamp {
                    clamp.limit(&mut changed);
                }
                &changed
            }
        };
        self.injector.room(
            self.pool,
            self.owner,
            self.template,
            seq,
            tcp,
            self.floor,
            len,
        )
    }

    fn commit(&mut self) {
        match self.is_refused {
            true => self.retract(),
            false => *self.received += self.last,
        }
    }

    fn retract(&mut self) {
        self.injector.retract(self.pool);
    }
}
