//! Many connections that stay open, each of which says something now and then and has it said back.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_netns::Host;
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;

use super::sockets::{PATIENCE, Transport};
use super::{join, percentile};

/// Bytes of a message.
const SIZE: usize = 64;
/// How long one who waits for messages does so at most before he looks whether it is over, in ms.
const LOOK: u16 = 50;
/// What the listener is called among the connections.
const LISTENER: u64 = u64::MAX;

/// So many open connections.
#[derive(Debug)]
pub struct Beats {
    near: Vec<TcpStream>,
    from: Host,
    over: Arc<AtomicBool>,
    server: JoinHandle<Result<()>>,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct BeatsReport {
    /// Messages that came back.
    pub count: usize,
    /// The median time that one took to and fro.
    pub p50_us: f64,
    /// 99 % took no longer.
    pub p99_us: f64,
    /// Messages that were not sent when they were due, since the one before was not back.
    pub late: usize,
}

/// A connection as the one who speaks sees it.
#[derive(Clone, Copy, Debug, Default)]
struct Beat {
    said: Option<Instant>,
    /// Bytes of it that are back.
    heard: usize,
}

impl Beats {
    /// Opens them, and sends a message to and fro over each.
    ///
    /// # Errors
    /// If one does not come about, or this process may not open as many.
    pub fn open(from: &Host, to: &Host, address: SocketAddr, count: usize) -> Result<Self> {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
            .with_context(|| format!("{soft} open files, {hard} at most"))?;
        // Those that were closed a minute ago hold ports still.
        from.sysctl("net.ipv4.ip_local_port_range", "1024 65000")?;
        let over = Arc::new(AtomicBool::new(false));
        let (ready, is_ready) = mpsc::channel();
        let serve = {
            let (host, over) = (to.clone(), Arc::clone(&over));
            move || {
                // Both ends together may be more files than a process may have open: each has a table of its own.
                unshare(CloneFlags::CLONE_FILES).context("a table of open files")?;
                let listener = Transport::Tcp.listen(&host, address)?;
                let _ = ready.send(());
                serve(&listener, &over)
            }
        };
        let server = to.thread("echo", serve)?;
        // What is opened from here on is the client's alone. Without a listener, connecting says so.
        let _ = is_ready.recv();
        let mut all = Self {
            near: Vec::with_capacity(count),
            from: from.clone(),
            over,
            server,
        };
        let opened = (0..count).try_for_each(|_| all.connect(address));
        match opened {
            Ok(()) => Ok(all),
            Err(error) => Err(all.close().err().unwrap_or(error)),
        }
    }

    fn connect(&mut self, address: SocketAddr) -> Result<()> {
        let mut stream = Transport::Tcp.connect(&self.from, address)?;
        let mut message = [0x5a; SIZE];
        stream.write_all(&message).context("the first message")?;
        stream
            .read_exact(&mut message)
            .context("the first answer")?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        self.near.push(stream);
        Ok(())
    }

    /// Has each speak once an interval, all of them evenly spread over it, and closes them.
    ///
    /// # Errors
    /// If a connection breaks, or an answer does not come.
    pub fn run(mut self, interval: Duration, duration: Duration) -> Result<BeatsReport> {
        let near = std::mem::take(&mut self.near);
        let speak = move || speak(near, interval, duration);
        let said = join(vec![self.from.thread("speak", speak)?]);
        self.close()?;
        said?.pop().context("one thread speaks")
    }

    /// Closes what is open.
    ///
    /// # Errors
    /// If the far end met with something else.
    pub fn close(self) -> Result<()> {
        self.over.store(true, Ordering::Relaxed);
        join(vec![self.server]).map(drop)
    }
}

/// Accepts whoever comes, and says back whatever they say, until it is over.
fn serve(listener: &TcpListener, over: &AtomicBool) -> Result<()> {
    let mut waiting = Waiting::new()?;
    let listens = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
    waiting.epoll.add(listener, listens).context("epoll")?;
    let (mut streams, mut room) = (Vec::new(), [0; 4 * SIZE]);
    while !over.load(Ordering::Relaxed) {
        for at in waiting.ready(LOOK)? {
            if at == LISTENER {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    Err(error) => return Err(error).context("accept"),
                };
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                waiting.add(&stream, streams.len())?;
                streams.push(stream);
                continue;
            }
            let stream = &mut streams[at as usize];
            let len = stream.read(&mut room).context("a message")?;
            if len == 0 {
                // Its end has come, and is looked for no more.
                waiting.epoll.delete(&*stream).context("epoll")?;
                continue;
            }
            // There is room: no more is under way than was just read.
            stream.write_all(&room[..len]).context("an answer")?;
        }
    }
    Ok(())
}

fn speak(
    mut streams: Vec<TcpStream>,
    interval: Duration,
    duration: Duration,
) -> Result<BeatsReport> {
    let mut waiting = Waiting::new()?;
    for (at, stream) in streams.iter().enumerate() {
        waiting.add(stream, at)?;
    }
    let message = [0x5a; SIZE];
    let mut room = [0; SIZE];
    let mut beats = vec![Beat::default(); streams.len()];
    let (mut times, mut late, mut unanswered, mut due) = (Vec::new(), 0, 0, 0);
    let start = Instant::now();
    loop {
        let elapsed = start.elapsed();
        ensure!(
            elapsed < duration + PATIENCE,
            "{unanswered} messages did not come back within {PATIENCE:?}"
        );
        if elapsed >= duration && unanswered == 0 {
            break;
        }
        let until = elapsed.min(duration).as_secs_f64() / interval.as_secs_f64();
        let until = (until * streams.len() as f64) as usize;
        for number in due..until {
            let at = number % streams.len();
            if beats[at].said.is_some() {
                late += 1;
                continue;
            }
            streams[at].write_all(&message).context("a message")?;
            beats[at].said = Some(Instant::now());
            unanswered += 1;
        }
        due = until;
        // The next of ten thousand is due in less than what epoll can count.
        for at in waiting.ready(1)? {
            let at = at as usize;
            let len = streams[at].read(&mut room).context("an answer")?;
            ensure!(len > 0, "a connection was closed");
            beats[at].heard += len;
            if beats[at].heard == SIZE {
                let said = std::mem::take(&mut beats[at]).said;
                times.push(said.context("an answer that nobody asked for")?.elapsed());
                unanswered -= 1;
            }
        }
    }
    times.sort_unstable();
    Ok(BeatsReport {
        count: times.len(),
        p50_us: percentile(&times, 0.5),
        p99_us: percentile(&times, 0.99),
        late,
    })
}

/// Waits for any of many connections to have something to read.
struct Waiting {
    epoll: Epoll,
    events: Vec<EpollEvent>,
}

impl Waiting {
    fn new() -> Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("epoll")?,
            events: vec![EpollEvent::empty(); 256],
        })
    }

    fn add(&mut self, stream: &TcpStream, at: usize) -> Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, at as u64);
        self.epoll.add(stream, event).context("epoll")
    }

    /// Those that are ready, by what they are called; none after so many ms.
    fn ready(&mut self, most: u16) -> Result<Vec<u64>> {
        let ready = match self.epoll.wait(&mut self.events, EpollTimeout::from(most)) {
            Ok(ready) => ready,
            Err(Errno::EINTR) => 0,
            Err(error) => return Err(error).context("epoll"),
        };
        Ok(self.events[..ready].iter().map(EpollEvent::data).collect())
    }
}
