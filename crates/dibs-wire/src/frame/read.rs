//! Bytes to frames of all kinds.

use core::net::Ipv6Addr;

use super::flow::{get_chunk, get_segment};
use super::{
    ACK, CHUNK, CONTROL, Chunk, EPOCH_BROKEN, FLOW_UNKNOWN, FRAGMENT, FlowId, Frame, FrameError,
    OPAQUE, PADDING, PATH_ACCEPT, PATH_CHALLENGE, PATH_CONFIRM, PATH_JOIN, PATH_RESPONSE, PING,
    PING_SPENT, SEGMENT, SHARE, SHARE_OF_SEGMENTS, Share,
};
use crate::bytes::Reader;

/// The frames of a header block, one by one; padding is skipped. After an error it ends.
#[derive(Clone, Debug)]
pub struct Frames<'a> {
    reader: Reader<'a>,
}

impl<'a> Frames<'a> {
    /// Reads `block` from its start.
    pub const fn new(block: &'a [u8]) -> Self {
        Self {
            reader: Reader::new(block),
        }
    }

    /// Reads the next frame into `chunk` if it is one, as nearly all are: without the copies that a [`Frame`]
    /// goes through. `None` if it is another, or there is none.
    #[inline]
    pub fn chunk(&mut self, chunk: &mut Chunk<'a>) -> Option<Result<(), FrameError>> {
        let rest = self.reader.rest();
        let padding = rest.iter().take_while(|kind| **kind == PADDING).count();
        if rest.get(padding) != Some(&CHUNK) {
            return None;
        }
        self.reader = Reader::new(&rest[padding + 1..]);
        let read = get_chunk(&mut self.reader, chunk);
        if read.is_err() {
            self.reader = Reader::new(&[]);
        }
        Some(read)
    }

    #[inline(always)]
    fn read(&mut self, kind: u8) -> Result<Frame<'a>, FrameError> {
        let r = &mut self.reader;
        let flag = |r: &mut Reader<'_>| match r.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::Range("trust label")),
        };
        fn block<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], FrameError> {
            let len = usize::from(r.u16()?);
            Ok(r.take(len)?)
        }
        Ok(match kind {
            PING => Frame::Ping,
            PING_SPENT => Frame::PingSpent,
            ACK => Frame::Ack(block(r)?),
            CHUNK => {
                let mut chunk = Chunk::EMPTY;
                get_chunk(r, &mut chunk)?;
                Frame::Chunk(chunk)
            }
            SEGMENT => Frame::Segment(get_segment(r)?),
            OPAQUE => Frame::Opaque {
                bump: r.u8()?,
                packet: block(r)?,
            },
            FRAGMENT => Frame::Fragment {
                id: r.u32()?,
                at: r.u32()?,
                total: r.u32()?,
                header: r.u16()?,
                bytes: block(r)?,
            },
            SHARE | SHARE_OF_SEGMENTS => {
                let share = Share {
                    fleeting: kind == SHARE_OF_SEGMENTS,
                    bump: r.u8()?,
                    set: r.u32()?,
                    index: r.u8()?,
                    needed: r.u8()?,
                    shares: r.u8()?,
                };
                let possible = 0 < share.needed && share.needed <= share.shares;
                if !possible || share.index >= share.shares {
                    return Err(FrameError::Range("share"));
                }
                Frame::Share(share)
            }
            CONTROL => Frame::Control {
                id: r.u32()?,
                bytes: block(r)?,
            },
            FLOW_UNKNOWN => Frame::FlowUnknown {
                flow: FlowId::new(r.u32()?),
                incarnation: r.u16()?,
            },
            EPOCH_BROKEN => Frame::EpochBroken {
                flow: FlowId::new(r.u32()?),
                incarnation: r.u16()?,
                epoch: r.u32()?,
            },
            PATH_JOIN => Frame::PathJoin {
                nonce: r.array()?,
                trusted: flag(r)?,
                to: Ipv6Addr::from(r.array::<16>()?).to_canonical(),
            },
            PATH_ACCEPT => Frame::PathAccept {
                nonce: r.array()?,
                challenge: r.array()?,
                trusted: flag(r)?,
            },
            PATH_CONFIRM => Frame::PathConfirm {
                challenge: r.array()?,
            },
            PATH_CHALLENGE => Frame::PathChallenge {
                challenge: r.array()?,
            },
            PATH_RESPONSE => Frame::PathResponse {
                challenge: r.array()?,
            },
            other => return Err(FrameError::UnknownType(other)),
        })
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, FrameError>;

    // Inlined, or what was just written in parts is copied whole, which has to wait for the writes.
    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let kind = loop {
            match self.reader.u8().ok()? {
                PADDING => {}
                kind => break kind,
            }
        };
        let frame = self.read(kind);
        if frame.is_err() {
            self.reader = Reader::new(&[]);
        }
        Some(frame)
    }
}
