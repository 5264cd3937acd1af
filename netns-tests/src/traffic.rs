//! Connections whose every byte is checked.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dibs_lab::Plaintext;
use dibs_lab::load::{join, retransmissions};
use dibs_netns::{HANG, Host, wait_for, wait_until};
use nix::unistd::{Uid, geteuid, setfsuid};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::eavesdropper::Eavesdropper;

/// How long a connection may stand still. TCP doubles its timeouts while nobody answers: after 30
/// seconds of silence the next attempt may be 30 more away.
const PATIENCE: Duration = HANG;
/// Bytes per read.
const CHUNK: usize = 16 << 10;
/// Bytes that a talker writes at once.
const BURST: usize = 64 << 10;
/// Time between two bursts, which make 2 MB/s. Tests that run beside each other would otherwise leave each other no processor.
const EVERY: Duration = Duration::from_millis(32);

/// More bytes than can still be under way on a link: what is heard after so many was sent after whatever
/// happened before them.
pub const SETTLED: u64 = 512 << 10;

/// A connection on which both ends send without end, and check what they receive.
#[derive(Debug)]
pub struct Talk {
    /// Bytes that the client and the server send.
    pub plaintexts: [Plaintext; 2],
    /// The client's end.
    pub client: SocketAddr,
    /// Of the client's bytes, of the server's.
    received: [Arc<Received>; 2],
    ends: [TcpStream; 2],
    /// Segments that both ends had sent again when somebody last asked.
    resent: AtomicU64,
    stop: Arc<AtomicBool>,
    writers: Vec<JoinHandle<Result<u64>>>,
    readers: Vec<JoinHandle<Result<u64>>>,
}

/// What arrived at an end.
#[derive(Debug, Default)]
struct Received {
    bytes: AtomicU64,
    /// Longest time without any since somebody last asked.
    pause_us: AtomicU64,
}

impl Talk {
    /// Connects, and starts talking.
    ///
    /// # Errors
    /// If the connection does not come about.
    pub fn start(from: &Host, to: &Host, server: SocketAddr) -> Result<Self> {
        Self::over(from, to, connect(from, to, server)?)
    }

    /// Starts talking on a connection.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn over(from: &Host, to: &Host, ends: (TcpStream, TcpStream)) -> Result<Self> {
        Self::in_bursts([Some(EVERY); 2], from, to, ends)
    }

    /// The same, with 64 KiB from the client and from the server every so often; none: that end only listens.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn in_bursts(
        every: [Option<Duration>; 2],
        from: &Host,
        to: &Host,
        (near, far): (TcpStream, TcpStream),
    ) -> Result<Self> {
        let mut talk = Self {
            plaintexts: [next_plaintext(), next_plaintext()],
            client: near.local_addr()?,
            received: Default::default(),
            ends: [near.try_clone()?, far.try_clone()?],
            resent: AtomicU64::new(0),
            stop: Arc::default(),
            writers: Vec::new(),
            readers: Vec::new(),
        };
        let ends = [(from, near), (to, far)];
        for (number, (host, stream)) in ends.into_iter().enumerate() {
            let (mine, theirs) = (talk.plaintexts[number], talk.plaintexts[1 - number]);
            let reading = stream.try_clone()?;
            let (every, stop) = (every[number], Arc::clone(&talk.stop));
            let received = Arc::clone(&talk.received[1 - number]);
            let writer = host.thread("writer", move || write(stream, mine, every, &stop))?;
            let reader = host.thread("reader", move || read(reading, theirs, &received))?;
            talk.writers.push(writer);
            talk.readers.push(reader);
        }
        Ok(talk)
    }

    /// Bytes that have arrived: the client's, the server's.
    pub fn received(&self) -> [u64; 2] {
        self.received
            .each_ref()
            .map(|received| received.bytes.load(Ordering::Relaxed))
    }

    /// Waits until so many more bytes have arrived in each direction.
    ///
    /// # Errors
    /// If they do not, or are not those sent.
    pub fn advance(&self, bytes: u64) -> Result<()> {
        let from = self.received();
        let advanced = || {
            let now = self.received();
            now.iter().zip(from).all(|(now, from)| now - from >= bytes)
        };
        let broken = || self.readers.iter().any(JoinHandle::is_finished);
        let what = format!("{bytes} bytes each way");
        wait_until(PATIENCE, &what, || advanced() || broken())
            .with_context(|| format!("received {from:?}, then {:?}", self.received()))?;
        ensure!(advanced(), "the connection broke at {:?}", self.received());
        Ok(())
    }

    /// Segments that both ends sent again, and the longest time in which nothing arrived at one of them, since the call before.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn strain(&self) -> Result<(u64, Duration)> {
        let resent = self.ends.iter().map(retransmissions);
        let resent: u64 = resent.sum::<Result<u64>>()?;
        let before = self.resent.swap(resent, Ordering::Relaxed);
        let received = self.received.iter();
        let longest = received.map(|it| it.pause_us.swap(0, Ordering::Relaxed));
        let longest = longest.max().expect("there are two ends");
        Ok((resent - before, Duration::from_micros(longest)))
    }

    /// Waits for a time in which nothing arrives in either direction.
    ///
    /// # Errors
    /// If bytes keep arriving.
    pub fn stands_still(&self, time: Duration) -> Result<()> {
        let mut last = (Instant::now(), self.received());
        wait_until(PATIENCE, "silence", || {
            let received = self.received();
            if received != last.1 {
                last = (Instant::now(), received);
            }
            last.0.elapsed() >= time
        })
    }

    /// Lets both ends finish, and checks that all that was sent has arrived.
    ///
    /// # Errors
    /// If the connection broke, or delivered other bytes than those sent.
    pub fn finish(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let received = join(self.readers);
        let sent = join(self.writers);
        // What went wrong at a reader is the cause of what a writer complains of.
        let (received, mut sent) = (received?, sent?);
        sent.reverse();
        ensure!(
            sent == received,
            "sent {sent:?} bytes, received {received:?}"
        );
        Ok(())
    }

    /// The same, and ends the recordings, in which nothing of it may be in plain, of these bytes at least.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish) and of [`heard_nothing`](Eavesdropper::heard_nothing).
    pub fn finish_unheard(self, ears: Eavesdropper, least: usize) -> Result<()> {
        let plaintexts = self.plaintexts;
        self.finish()?;
        ears.heard_nothing(&plaintexts, least)
    }
}

/// Sends a message over a new connection and reads it back.
///
/// # Errors
/// If it does not come back, or not as it was.
pub fn echo(from: &Host, to: &Host, server: SocketAddr, bytes: usize) -> Result<()> {
    let (mut near, mut far) = connect(from, to, server)?;
    let answer = to.thread("echo", move || -> Result<()> {
        let mut buffer = [0; CHUNK];
        loop {
            let read = far.read(&mut buffer).context("echo")?;
            if read == 0 {
                return Ok(());
            }
            far.write_all(&buffer[..read]).context("echo")?;
        }
    })?;
    let plaintext = next_plaintext();
    let mut sending = near.try_clone()?;
    let writer = from.thread("writer", move || -> Result<()> {
        let mut message = vec![0; bytes];
        plaintext.fill(0, &mut message);
        sending.write_all(&message).context("send")?;
        sending.shutdown(Shutdown::Write).context("shutdown")
    })?;
    let received = read_all(&mut near, plaintext, &Received::default());
    let done = join(vec![answer, writer]);
    let received = received?;
    done?;
    ensure!(
        received == bytes as u64,
        "{received} of {bytes} bytes came back"
    );
    Ok(())
}

/// Sends an ICMP echo request, and waits for the reply.
///
/// # Errors
/// If there is none.
pub fn ping(from: &Host, to: IpAddr) -> Result<()> {
    // The kernel's own ICMP echo sockets: it sees to identifiers and checksums.
    from.sysctl("net.ipv4.ping_group_range", "0 0")?;
    let (domain, protocol, request, reply) = match to {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    let mut socket = from
        .in_ns(|| Socket::new(domain, Type::DGRAM, Some(protocol)))
        .context("ICMP socket")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    // Type, code, checksum, identifier, sequence number, data (RFC 792, RFC 4443).
    let mut message = [request, 0, 0, 0, 0, 0, 0, 1, 0xd1, 0xb5];
    socket.send_to(&message, &SocketAddr::new(to, 0).into())?;
    let read = socket.read(&mut message).context("echo reply")?;
    ensure!(
        message[..read].starts_with(&[reply]) && message.ends_with(&[0xd1, 0xb5]),
        "no echo reply: {message:?}"
    );
    Ok(())
}

/// Both ends of a new connection; sockets that give up after a while.
///
/// # Errors
/// If it does not come about.
pub fn connect(from: &Host, to: &Host, server: SocketAddr) -> Result<(TcpStream, TcpStream)> {
    connect_from(0, from, to, server)
}

/// As [`connect`], from this port; 0: any.
///
/// # Errors
/// If it does not come about.
pub fn connect_from(
    port: u16,
    from: &Host,
    to: &Host,
    server: SocketAddr,
) -> Result<(TcpStream, TcpStream)> {
    connect_as(geteuid(), port, from, to, server)
}

/// As [`connect_from`]; the socket is of this user.
///
/// # Errors
/// If it does not come about.
pub fn connect_as(
    uid: Uid,
    port: u16,
    from: &Host,
    to: &Host,
    server: SocketAddr,
) -> Result<(TcpStream, TcpStream)> {
    connect_translated(uid, port, from, to, [server; 2])
}

/// As [`connect_as`], to a server whose address is translated on the way: where it listens, and where it is called.
///
/// # Errors
/// If it does not come about.
pub fn connect_translated(
    uid: Uid,
    port: u16,
    from: &Host,
    to: &Host,
    [listens, server]: [SocketAddr; 2],
) -> Result<(TcpStream, TcpStream)> {
    let listener = to
        .in_ns(|| TcpListener::bind(listens))
        .with_context(|| format!("listen at {listens}"))?;
    listener.set_nonblocking(true)?;
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let near = from.in_ns(|| -> std::io::Result<TcpStream> {
        setfsuid(uid);
        let socket = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
        socket.set_reuse_address(port != 0)?;
        socket.bind(&SocketAddr::new(any, port).into())?;
        socket.connect_timeout(&server.into(), PATIENCE)?;
        Ok(socket.into())
    });
    let near = near.with_context(|| format!("connect to {server}"))?;
    let accepted = wait_for(PATIENCE, "a connection", || match listener.accept() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        result => Some(result),
    })?;
    let (far, _) = accepted.context("accept")?;
    for stream in [&near, &far] {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
    }
    Ok((near, far))
}

/// Ends a connection at once, with a RST.
///
/// # Errors
/// If the system does not let it.
pub fn abort((near, far): (TcpStream, TcpStream)) -> Result<()> {
    SockRef::from(&near).set_linger(Some(Duration::ZERO))?;
    drop(near);
    let mut far = far;
    let ended = far.read(&mut [0]);
    ensure!(ended.is_err(), "no RST, but {ended:?}");
    Ok(())
}

/// A stream that no other connection of the test carries.
pub fn next_plaintext() -> Plaintext {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    Plaintext::new(NEXT.fetch_add(1, Ordering::Relaxed))
}

fn write(
    mut stream: TcpStream,
    plaintext: Plaintext,
    every: Option<Duration>,
    stop: &AtomicBool,
) -> Result<u64> {
    let mut sent = 0;
    let mut buffer = vec![0; every.map_or(0, |_| BURST)];
    let every = every.unwrap_or(EVERY);
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        plaintext.fill(sent, &mut buffer);
        let written = again(|| stream.write(&buffer)).context("send")?;
        sent += written as u64;
        // No condition is awaited here: this is the rate of the load.
        std::thread::sleep(every.saturating_sub(begun.elapsed()));
    }
    stream.shutdown(Shutdown::Write).context("shutdown")?;
    Ok(sent)
}

/// A test that is suspended for a while has lost nothing by that.
fn again(mut call: impl FnMut() -> std::io::Result<usize>) -> std::io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

fn read(mut stream: TcpStream, plaintext: Plaintext, received: &Received) -> Result<u64> {
    let read = read_all(&mut stream, plaintext, received);
    if read.is_err() {
        // The far writer is to know.
        let _ = stream.shutdown(Shutdown::Both);
    }
    read
}

fn read_all(stream: &mut TcpStream, plaintext: Plaintext, received: &Received) -> Result<u64> {
    let (mut total, mut last) = (0, Instant::now());
    let (mut buffer, mut expected) = ([0; CHUNK], [0; CHUNK]);
    loop {
        let read = again(|| stream.read(&mut buffer)).context("receive")?;
        if read == 0 {
            return Ok(total);
        }
        plaintext.fill(total, &mut expected[..read]);
        if buffer[..read] != expected[..read] {
            bail!("the {read} bytes from {total} on are not those sent");
        }
        total += read as u64;
        received.bytes.store(total, Ordering::Relaxed);
        let paused = std::mem::replace(&mut last, Instant::now()).elapsed();
        let paused = paused.as_micros() as u64;
        received.pause_us.fetch_max(paused, Ordering::Relaxed);
    }
}
