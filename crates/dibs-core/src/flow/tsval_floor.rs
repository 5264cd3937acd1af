//! Time stamps that never go back.
//!
//! At a switch what is injected comes by two bumps, in any order. So a connection has one floor for all of them.

use dibs_wire::frame::TcpFields;
use smallvec::SmallVec;

use crate::tcp_fields::{is_behind, raise_tsval, timestamps};

/// How far the time stamp of a SYN that is still on its way may lie behind those of its connection: two minutes (RFC
/// 9293, 3.4.1) of milliseconds. A host that restarted begins as near once in 36,000 times, and connects by then.
const LIFETIME: u32 = 120_000;

/// The highest TSval that the local kernel was given in one direction of a connection, or echoed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TsvalFloor(Option<u32>);

impl TsvalFloor {
    /// True if a TSval does not lie behind it.
    pub fn admits(self, tsval: u32) -> bool {
        self.0.is_none_or(|floor| !is_behind(tsval, floor))
    }

    /// Raises the TSval of the fields to the floor where it lies behind that, and the floor to what results. `scratch`
    /// takes changed options.
    pub fn hold<'a>(&mut self, tcp: &mut TcpFields<'a>, scratch: &'a mut SmallVec<[u8; 64]>) {
        self.0 = raise_tsval(tcp, self.0, scratch).or(self.0);
    }

    /// The local kernel was given this one, or echoed it.
    pub fn raise(&mut self, tsval: u32) {
        if self.0.is_none_or(|floor| is_behind(floor, tsval)) {
            self.0 = Some(tsval);
        }
    }

    /// A connection begins with this SYN: the time stamps of an earlier one between the same ports are none of its.
    /// The host may have restarted, and a SYN with a time stamp that it never gave is answered in vain. But a SYN that
    /// waited for a path of one bump begins nothing where its connection went on by another.
    pub fn begin(&mut self, syn: &TcpFields<'_>) {
        let is_late = |tsval| {
            { self.0 }.is_some_and(|floor| (1..=LIFETIME).contains(&floor.wrapping_sub(tsval)))
        };
        if !timestamps(syn).is_some_and(|(tsval, _)| is_late(tsval)) {
            self.0 = None;
        }
    }
}
