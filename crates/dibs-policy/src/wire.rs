//! A netlink socket that asks one thing at a time.
//!
//! Requests wait for their answers in the kernel's buffer, so nothing here grows without bound.

use std::fmt::Debug;
use std::io;

use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};

/// How often a dump that the kernel calls inconsistent is asked for again.
const DUMP_ATTEMPTS: usize = 5;

pub(crate) struct Wire {
    socket: TokioSocket,
    sequence: u32,
    /// A question was asked, and not all of its answer was read.
    asking: bool,
}

impl Wire {
    /// A socket in the network namespace of the calling thread.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = TokioSocket::new(protocol)?;
        socket.socket_mut().bind_auto()?;
        Ok(Self {
            socket,
            sequence: 0,
            asking: false,
        })
    }

    /// Whether all answers were read: the kernel does not begin a second dump before the first has ended.
    pub(crate) fn is_idle(&self) -> bool {
        !self.asking
    }

    /// Everything of a kind.
    pub(crate) async fn dump<T>(&mut self, message: T) -> io::Result<Vec<T>>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Debug + Clone,
        NetlinkPayload<T>: From<T>,
    {
        self.gather(message, Some).await
    }

    /// What `pick` makes of everything of a kind. Messages are many times as long as what one wants of
    /// them, so they are not kept: a list of thousands would leave its size with the process for good.
    pub(crate) async fn gather<T, U>(
        &mut self,
        message: T,
        mut pick: impl FnMut(T) -> Option<U>,
    ) -> io::Result<Vec<U>>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Debug + Clone,
        NetlinkPayload<T>: From<T>,
    {
        for _ in 0..DUMP_ATTEMPTS {
            let exchanged = self.exchange(message.clone(), NLM_F_DUMP, &mut pick);
            if let Some(answers) = exchanged.await? {
                return Ok(answers);
            }
        }
        Err(io::Error::other("what was listed kept changing"))
    }

    /// One change or question, acknowledged.
    pub(crate) async fn request<T>(&mut self, message: T, flags: u16) -> io::Result<Vec<T>>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Debug + Clone,
        NetlinkPayload<T>: From<T>,
    {
        Ok(self
            .exchange(message, NLM_F_ACK | flags, &mut Some)
            .await?
            .unwrap_or_default())
    }

    /// As [`request`](Self::request), right after another change: the kernel does nothing else for this process in between.
    /// Refusal of the first is not told.
    pub(crate) async fn request_after<T>(
        &mut self,
        first: T,
        message: T,
        flags: u16,
    ) -> io::Result<()>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Debug + Clone,
        NetlinkPayload<T>: From<T>,
    {
        let mut buffer = self.serialized(first, 0);
        buffer.extend(self.serialized(message, NLM_F_ACK | flags));
        self.answers(&buffer, &mut Some::<T>).await.map(drop)
    }

    /// A request, as the kernel reads it.
    fn serialized<T>(&mut self, message: T, flags: u16) -> Vec<u8>
    where
        T: NetlinkSerializable + Debug,
        NetlinkPayload<T>: From<T>,
    {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = NetlinkMessage::from(message);
        request.header.flags = NLM_F_REQUEST | flags;
        request.header.sequence_number = self.sequence;
        request.finalize();
        let mut buffer = vec![0; request.buffer_len()];
        request.serialize(&mut buffer);
        buffer
    }

    /// Answers until the end of the dump or the acknowledgement; `None` if the dump is inconsistent.
    async fn exchange<T, U>(
        &mut self,
        message: T,
        flags: u16,
        pick: &mut impl FnMut(T) -> Option<U>,
    ) -> io::Result<Option<Vec<U>>>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Debug,
        NetlinkPayload<T>: From<T>,
    {
        let buffer = self.serialized(message, flags);
        self.answers(&buffer, pick).await
    }

    /// Answers to the last of these requests.
    async fn answers<T, U>(
        &mut self,
        requests: &[u8],
        pick: &mut impl FnMut(T) -> Option<U>,
    ) -> io::Result<Option<Vec<U>>>
    where
        T: NetlinkDeserializable + Debug,
    {
        self.asking = true;
        self.socket
            .send_to(requests, &SocketAddr::new(0, 0))
            .await?;
        let mut answers = Vec::new();
        let mut consistent = true;
        loop {
            for answer in receive::<T>(&self.socket).await? {
                if answer.header.sequence_number != self.sequence {
                    continue; // of an earlier request, given up half way
                }
                consistent &= answer.header.flags & NLM_F_DUMP_INTR == 0;
                match answer.payload {
                    NetlinkPayload::InnerMessage(inner) => answers.extend(pick(inner)),
                    NetlinkPayload::Done(_) => {
                        self.asking = false;
                        return Ok(consistent.then_some(answers));
                    }
                    NetlinkPayload::Error(error) => {
                        self.asking = false;
                        return match error.code {
                            Some(_) => Err(error.to_io()),
                            None => Ok(Some(answers)),
                        };
                    }
                    _ => {}
                }
            }
        }
    }
}

/// The messages of the next datagram; those that cannot be read are skipped.
pub(crate) async fn receive<T>(socket: &TokioSocket) -> io::Result<Vec<NetlinkMessage<T>>>
where
    T: NetlinkDeserializable + Debug,
{
    let (datagram, from) = socket.recv_from_full().await?;
    let mut messages = Vec::new();
    if from.port_number() != 0 {
        return Ok(messages); // not from the kernel
    }
    let mut rest = datagram.as_slice();
    while let Some(head) = rest.first_chunk::<4>() {
        let length = u32::from_ne_bytes(*head) as usize;
        if length < 16 || length > rest.len() {
            break;
        }
        match NetlinkMessage::deserialize(&rest[..length]) {
            Ok(message) => messages.push(message),
            Err(error) => tracing::debug!(%error, "skipped a netlink message"),
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(messages)
}
