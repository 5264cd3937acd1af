//! nftables over netlink: just what the [backstop](crate::Backstop) needs, without a program.
//!
//! By hand because the crates for it start `nft` for each change (nftables), bind a library in C (nftnl), or are
//! under the GPL (rustables).
//!
//! A table belongs to the socket that made it (`NFT_TABLE_F_OWNER`, Linux 5.12): the kernel lets nobody
//! else change it, and `nft flush ruleset` passes it over. With `NFT_TABLE_F_PERSIST` (Linux 6.9) it
//! outlives the socket, and the next one takes it over.

use std::io;
use std::time::Duration;

use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};

/// linux/netfilter/nfnetlink.h.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// NFPROTO_INET: both families.
const INET: u8 = 1;

const ERROR: u16 = 2;
const DONE: u16 = 3;
const F_REQUEST: u16 = 0x1;
const F_ACK: u16 = 0x4;
const F_DUMP: u16 = 0x300;
const F_DUMP_INTR: u16 = 0x10;
const F_CREATE: u16 = 0x400;
const F_APPEND: u16 = 0x800;

const HEADER: usize = 16;
/// Of struct nfgenmsg.
const GENERIC: usize = 4;
/// What the kernel counts beside a message that is sent (netlink_sendmsg).
const OVERHEAD: usize = 32;
/// How often a dump that the kernel calls inconsistent is asked for again.
const DUMP_ATTEMPTS: usize = 5;

/// Messages of linux/netfilter/nf_tables.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    NewTable = 0,
    GetTable = 1,
    DelTable = 2,
    NewChain = 3,
    GetChain = 4,
    DelChain = 5,
    NewRule = 6,
    GetRule = 7,
    DelRule = 8,
    NewSet = 9,
    NewElement = 12,
    GetElement = 13,
    DelElement = 14,
}

/// Netlink attributes in the making.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes(pub(crate) Vec<u8>);

impl Attributes {
    pub(crate) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).expect("our attributes are short");
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(crate) fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(crate) fn text(self, kind: u16, value: &str) -> Self {
        let mut terminated = value.as_bytes().to_vec();
        terminated.push(0);
        self.bytes(kind, &terminated)
    }

    pub(crate) fn nested(self, kind: u16, inner: Attributes) -> Self {
        const NESTED: u16 = 0x8000;
        self.bytes(kind | NESTED, &inner.0)
    }
}

/// The attributes in `bytes`, as far as they are whole.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (head, _) = rest.split_first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]) & 0x3fff;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of an attribute.
pub(crate) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|(found, _)| *found == kind)
        .map(|(_, value)| value)
}

/// Up to its terminating zero.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// One change of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) kind: Kind,
    pub(crate) attributes: Attributes,
}

/// A socket, and with it the tables that it owns.
pub(crate) struct Nft {
    socket: TokioSocket,
    port: u32,
    sequence: u32,
}

/// What becomes of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It takes place.
    Commit,
    /// The kernel looks at it, and forgets it.
    Check,
}

impl Nft {
    /// A socket in the network namespace of the calling thread.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        let port = socket.socket_mut().bind_auto()?.port_number();
        // Refusals without what was refused. A kernel that does not know this says more.
        let _ = socket.socket_ref().set_cap_ack(true);
        Ok(Self {
            socket,
            port,
            sequence: 0,
        })
    }

    /// Its number among netlink sockets.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// All changes at once, or none of them.
    pub(crate) async fn commit(&mut self, changes: &[Change]) -> io::Result<()> {
        self.transact(changes, Purpose::Commit).await
    }

    /// The same for either purpose.
    pub(crate) async fn transact(
        &mut self,
        changes: &[Change],
        purpose: Purpose,
    ) -> io::Result<()> {
        let Some((last, others)) = changes.split_last() else {
            return Ok(());
        };
        let mut batch = Vec::new();
        self.message(&mut batch, BATCH_BEGIN, F_REQUEST, &bracket());
        for change in others {
            self.change(&mut batch, change, 0);
        }
        self.change(&mut batch, last, F_ACK);
        let awaited = self.sequence;
        // Without its end the kernel undoes what it has done.
        if purpose == Purpose::Commit {
            self.message(&mut batch, BATCH_END, F_REQUEST, &bracket());
        }
        let first = awaited.wrapping_sub(changes.len() as u32);
        self.make_room(batch.len());
        self.discard().await;
        self.socket.send_to(&batch, &SocketAddr::new(0, 0)).await?;
        loop {
            let answers = match self.receive().await {
                // More refusals than there is room for: the first is there.
                Err(error) if is_overrun(&error) => {
                    self.receive_now().await.unwrap_or(Err(error))?
                }
                answers => answers?,
            };
            for (head, body) in &answers {
                // Errors of any change, and the acknowledgement of the last.
                let of_this = head.sequence.wrapping_sub(first) <= changes.len() as u32 + 1;
                if head.kind != ERROR || !of_this {
                    continue;
                }
                match code(body) {
                    0 if head.sequence == awaited => return Ok(()),
                    0 => {}
                    error => return Err(io::Error::from_raw_os_error(-error)),
                }
            }
        }
    }

    /// Has the socket take a transaction of so many bytes, which the kernel wants in one piece. Beyond
    /// `net.core.wmem_max` that takes CAP_NET_ADMIN in the first user namespace; without, sending fails.
    fn make_room(&self, length: usize) {
        let socket = self.socket.socket_ref();
        let room = getsockopt(socket, sockopt::SndBuf).unwrap_or(0);
        if length + OVERHEAD <= room {
            return;
        }
        // The kernel gives twice as much.
        if setsockopt(socket, sockopt::SndBufForce, &length).is_err() {
            let _ = setsockopt(socket, sockopt::SndBuf, &length);
        }
    }

    /// Forgets what is still to be read of an earlier transaction: it takes the room of what comes.
    async fn discard(&self) {
        while let Some(received) = self.receive_now().await {
            if received.is_err_and(|error| !is_overrun(&error)) {
                return;
            }
        }
    }

    /// What is there to be read, if anything is.
    async fn receive_now(&self) -> Option<io::Result<Vec<(Head, Vec<u8>)>>> {
        tokio::time::timeout(Duration::ZERO, self.receive())
            .await
            .ok()
    }

    /// The attributes of everything of a kind that matches `query`.
    pub(crate) async fn dump(
        &mut self,
        kind: Kind,
        query: &Attributes,
    ) -> io::Result<Vec<Vec<u8>>> {
        for _ in 0..DUMP_ATTEMPTS {
            if let Some(found) = self.dump_once(kind, query).await? {
                return Ok(found);
            }
        }
        Err(io::Error::other("what was listed kept changing"))
    }

    async fn dump_once(
        &mut self,
        kind: Kind,
        query: &Attributes,
    ) -> io::Result<Option<Vec<Vec<u8>>>> {
        let mut request = Vec::new();
        let body = generic(INET, 0, &query.0);
        let kind = SUBSYSTEM << 8 | kind as u16;
        self.message(&mut request, kind, F_REQUEST | F_DUMP, &body);
        let awaited = self.sequence;
        self.discard().await;
        self.socket
            .send_to(&request, &SocketAddr::new(0, 0))
            .await?;
        let (mut found, mut consistent) = (Vec::new(), true);
        loop {
            for (head, body) in self.receive().await? {
                if head.sequence != awaited {
                    continue;
                }
                consistent &= head.flags & F_DUMP_INTR == 0;
                match head.kind {
                    DONE => return Ok(consistent.then_some(found)),
                    ERROR if code(&body) != 0 => {
                        return Err(io::Error::from_raw_os_error(-code(&body)));
                    }
                    ERROR => {}
                    _ => found.push(body.get(GENERIC..).unwrap_or_default().to_vec()),
                }
            }
        }
    }

    fn change(&mut self, batch: &mut Vec<u8>, change: &Change, flags: u16) {
        let flags = match change.kind {
            Kind::NewRule => flags | F_CREATE | F_APPEND,
            Kind::NewTable | Kind::NewChain | Kind::NewSet | Kind::NewElement => flags | F_CREATE,
            _ => flags,
        };
        let kind = SUBSYSTEM << 8 | change.kind as u16;
        let body = generic(INET, 0, &change.attributes.0);
        self.message(batch, kind, F_REQUEST | flags, &body);
    }

    fn message(&mut self, to: &mut Vec<u8>, kind: u16, flags: u16, body: &[u8]) {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(HEADER + body.len()).expect("our messages are short");
        to.extend(length.to_ne_bytes());
        to.extend(kind.to_ne_bytes());
        to.extend(flags.to_ne_bytes());
        to.extend(self.sequence.to_ne_bytes());
        to.extend(0u32.to_ne_bytes());
        to.extend(body);
        to.resize(to.len().next_multiple_of(4), 0);
    }

    async fn receive(&self) -> io::Result<Vec<(Head, Vec<u8>)>> {
        let (datagram, from) = self.socket.recv_from_full().await?;
        if from.port_number() != 0 {
            return Ok(Vec::new()); // not from the kernel
        }
        Ok(messages(&datagram))
    }
}

/// What matters of a message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    kind: u16,
    flags: u16,
    sequence: u32,
}

/// The whole messages of a datagram.
fn messages(datagram: &[u8]) -> Vec<(Head, Vec<u8>)> {
    let mut found = Vec::new();
    let mut rest = datagram;
    while let Some(head) = rest.first_chunk::<HEADER>() {
        let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
        let length = word(0) as usize;
        let Some(body) = rest.get(HEADER..length) else {
            break;
        };
        let head = Head {
            kind: half(4),
            flags: half(6),
            sequence: word(8),
        };
        found.push((head, body.to_vec()));
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// The kernel had more to say than the socket holds.
fn is_overrun(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Of an NLMSG_ERROR; 0 is an acknowledgement.
fn code(body: &[u8]) -> i32 {
    body.first_chunk::<4>()
        .map_or(-libc::EPROTO, |code| i32::from_ne_bytes(*code))
}

fn generic(family: u8, resource: u16, attributes: &[u8]) -> Vec<u8> {
    let mut body = vec![family, 0];
    body.extend(resource.to_be_bytes());
    body.extend(attributes);
    body
}

/// Begins and ends a transaction.
fn bracket() -> Vec<u8> {
    generic(0, SUBSYSTEM, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_read_back() {
        let inner = Attributes::default().number(3, 7);
        let made = Attributes::default()
            .text(1, "dibs")
            .bytes(2, &[1])
            .nested(4, inner.clone());
        assert_eq!(made.0.len() % 4, 0);
        let read: Vec<(u16, &[u8])> = attributes(&made.0).collect();
        assert_eq!(read, [(1, &b"dibs\0"[..]), (2, &[1]), (4, &inner.0)]);
        assert_eq!(text(read[0].1), "dibs");
        assert_eq!(attribute(&inner.0, 3), Some(&[0, 0, 0, 7][..]));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            let _ = attributes(&bytes).count();
            for (_, body) in messages(&bytes) {
                let _ = code(&body);
            }
        }

        #[test]
        fn a_length_of_zero_ends_the_reading(zeros in 0usize..64) {
            let bytes = vec![0; zeros];
            proptest::prop_assert_eq!(messages(&bytes).len(), 0);
            proptest::prop_assert_eq!(attributes(&bytes).count(), 0);
        }
    }
}
