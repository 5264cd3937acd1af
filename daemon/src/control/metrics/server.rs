//! HTTP for scrapers: anybody on this host may connect, so nobody can keep others out or the daemon busy.
//!
//! Clients that ask within a second share one collection. There are few clients at once: the oldest that has sent no
//! request yet, or does not read its answer, goes for one more.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Notify};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

/// Clients at once.
pub(super) const CLIENTS: usize = 8;
/// More than any scraper sends.
const MAX_REQUEST: usize = 8 << 10;
/// Between two tries to accept while there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// An answer to a client.
pub(super) struct Answer {
    status: &'static str,
    kind: &'static str,
    body: String,
}

impl Answer {
    /// With metrics.
    pub(super) fn metrics(body: String) -> Self {
        Self {
            status: "200 OK",
            kind: CONTENT,
            body,
        }
    }

    /// With a sentence.
    pub(super) fn plain(status: &'static str, body: impl Into<String>) -> Self {
        Self {
            status,
            kind: PLAIN,
            body: body.into(),
        }
    }
}

/// The source of metrics.
pub(super) trait Collects {
    /// All of them, as they are now.
    async fn collect(&self) -> Answer;
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Metrics are not collected again before.
    pub(super) fresh: Duration,
    /// A client's time for its request: it sends that as soon as it is connected.
    pub(super) request: Duration,
    /// A client's time to read the answer.
    pub(super) answer: Duration,
}

impl Limits {
    /// Metrics of the daemon.
    pub(super) const USUAL: Self = Self {
        fresh: Duration::from_secs(1),
        request: Duration::from_secs(2),
        answer: Duration::from_secs(10),
    };
}

/// See the module.
pub(super) struct Server<C> {
    source: C,
    limits: Limits,
    /// Metrics that were collected last, and when. Whoever comes while that is done waits for it.
    collected: Mutex<Option<(Instant, Rc<Answer>)>>,
    clients: RefCell<VecDeque<Rc<Client>>>,
    left: Notify,
}

/// A connected client.
#[derive(Default)]
struct Client {
    /// The client waits for metrics.
    waits: Cell<bool>,
    evicted: Notify,
}

impl<C: Collects + 'static> Server<C> {
    pub(super) fn new(source: C, limits: Limits) -> Self {
        Self {
            source,
            limits,
            collected: Mutex::default(),
            clients: RefCell::default(),
            left: Notify::new(),
        }
    }

    /// Serves without end. Runs inside a [`tokio::task::LocalSet`].
    pub(super) async fn serve(self: Rc<Self>, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // Out of descriptors, most likely: those in use have to end first.
                sleep(PAUSE).await;
                continue;
            };
            self.make_room().await;
            let client = Rc::new(Client::default());
            self.clients.borrow_mut().push_back(Rc::clone(&client));
            tokio::task::spawn_local(Rc::clone(&self).attend(client, stream));
            // A request that is there already is read before another client comes.
            yield_now().await;
        }
    }

    async fn make_room(&self) {
        while self.clients.borrow().len() >= CLIENTS {
            let idle = {
                let mut clients = self.clients.borrow_mut();
                let oldest = clients.iter().position(|client| !client.waits.get());
                oldest.and_then(|at| clients.remove(at))
            };
            match idle {
                Some(client) => client.evicted.notify_one(),
                // They all wait for the same, and will have it.
                None => self.left.notified().await,
            }
        }
    }

    async fn attend(self: Rc<Self>, client: Rc<Client>, stream: TcpStream) {
        let served = tokio::select! {
            served = self.serve_client(&client, stream) => served,
            () = client.evicted.notified() => Err(io::Error::other("it gave way to others")),
        };
        if let Err(error) = served {
            tracing::debug!("metrics: {error}");
        }
        let mut clients = self.clients.borrow_mut();
        clients.retain(|other| !Rc::ptr_eq(other, &client));
        self.left.notify_one();
    }

    async fn serve_client(&self, client: &Client, mut stream: TcpStream) -> io::Result<()> {
        let request = timeout(self.limits.request, request(&mut stream)).await??;
        let answer = match asked(&request) {
            Asked::Metrics => {
                client.waits.set(true);
                let answer = self.metrics().await;
                client.waits.set(false);
                answer
            }
            Asked::Elsewhere => {
                Rc::new(Answer::plain("404 Not Found", "metrics are at /metrics\n"))
            }
            Asked::Otherwise => {
                Rc::new(Answer::plain("405 Method Not Allowed", "metrics are got\n"))
            }
            Asked::Nonsense => Rc::new(Answer::plain("400 Bad Request", "this is no request\n")),
        };
        let Answer { status, kind, body } = &*answer;
        let length = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        let answered = async {
            stream.write_all(text.as_bytes()).await?;
            stream.shutdown().await
        };
        timeout(self.limits.answer, answered).await?
    }

    async fn metrics(&self) -> Rc<Answer> {
        let mut collected = self.collected.lock().await;
        if let Some((at, answer)) = &*collected
            && at.elapsed() < self.limits.fresh
        {
            return Rc::clone(answer);
        }
        let answer = Rc::new(self.source.collect().await);
        *collected = Some((Instant::now(), Rc::clone(&answer)));
        answer
    }
}

/// Request up to the first empty line, as far as there is room for it.
async fn request(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while request.len() < MAX_REQUEST && !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut piece).await? {
            0 => break,
            len => request.extend_from_slice(&piece[..len]),
        }
    }
    Ok(request)
}

/// The aim of a request.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics,
    Elsewhere,
    Otherwise,
    Nonsense,
}

fn asked(request: &[u8]) -> Asked {
    let line = request.split(|byte| *byte == b'\r').next();
    let line = line.and_then(|line| std::str::from_utf8(line).ok());
    let words: Vec<&str> = line.unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else {
        return Asked::Nonsense;
    };
    let path = target.split('?').next();
    match method {
        _ if !version.starts_with("HTTP/1.") => Asked::Nonsense,
        "GET" if path == Some("/metrics") => Asked::Metrics,
        "GET" => Asked::Elsewhere,
        _ => Asked::Otherwise,
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;

    use super::*;

    /// Longer than anything takes on a busy machine.
    const LONG: Duration = Duration::from_secs(1000);

    /// Counts how often it is asked.
    #[derive(Default)]
    struct Counting(Rc<Cell<u32>>);

    impl Collects for Counting {
        async fn collect(&self) -> Answer {
            self.0.set(self.0.get() + 1);
            // Others come meanwhile.
            yield_now().await;
            Answer::metrics(format!("asked {}\n", self.0.get()))
        }
    }

    /// A server with these limits, and how often it has collected.
    fn serving(limits: Limits, test: impl AsyncFnOnce(std::net::SocketAddr, Rc<Cell<u32>>)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        LocalSet::new().block_on(&runtime, async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let count = Rc::new(Cell::new(0));
            let server = Rc::new(Server::new(Counting(Rc::clone(&count)), limits));
            tokio::task::spawn_local(server.serve(listener));
            test(address, count).await;
        });
    }

    async fn scrape(address: std::net::SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    const LIMITS: Limits = Limits {
        fresh: LONG,
        request: LONG,
        answer: LONG,
    };

    #[test]
    fn all_who_ask_within_a_time_share_one_collection() {
        serving(LIMITS, async |address, count| {
            let together = futures_util::future::join_all((0..CLIENTS).map(|_| scrape(address)));
            for answer in together.await.into_iter().chain([scrape(address).await]) {
                assert!(answer.ends_with("\r\n\r\nasked 1\n"), "{answer}");
            }
            assert_eq!(count.get(), 1);
        });
        let limits = Limits {
            fresh: Duration::ZERO,
            ..LIMITS
        };
        serving(limits, async |address, count| {
            scrape(address).await;
            scrape(address).await;
            assert_eq!(count.get(), 2);
        });
    }

    /// As many as there is room for, and more.
    #[test]
    fn clients_that_say_nothing_keep_nobody_out() {
        serving(LIMITS, async |address, _| {
            let mut silent = Vec::new();
            for _ in 0..2 * CLIENTS {
                silent.push(TcpStream::connect(address).await.unwrap());
                let answer = scrape(address).await;
                assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
            }
            // The oldest was let go, the latest was not.
            assert_eq!(silent[0].read(&mut [0]).await.unwrap(), 0);
            let last = silent.last_mut().unwrap();
            last.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            last.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        });
    }

    #[test]
    fn a_client_that_says_nothing_is_let_go() {
        let limits = Limits {
            request: Duration::from_millis(20),
            ..LIMITS
        };
        serving(limits, async |address, _| {
            let mut silent = TcpStream::connect(address).await.unwrap();
            silent.write_all(b"GET /metrics").await.unwrap();
            assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
        });
    }

    #[test]
    fn requests_are_told_apart() {
        for (request, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Asked::Metrics),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", Asked::Metrics),
            ("GET / HTTP/1.1\r\n\r\n", Asked::Elsewhere),
            ("POST /metrics HTTP/1.1\r\n\r\n", Asked::Otherwise),
            ("GET /metrics HTTP/2\r\n\r\n", Asked::Nonsense),
            ("GET /metrics", Asked::Nonsense),
            ("", Asked::Nonsense),
            ("\u{16}\u{3}\u{1}", Asked::Nonsense),
        ] {
            assert_eq!(asked(request.as_bytes()), expected, "{request:?}");
        }
        assert_eq!(asked(b"\xff\xfe /metrics HTTP/1.1\r\n"), Asked::Nonsense);
    }
}
