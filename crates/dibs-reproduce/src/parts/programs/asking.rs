//! nginx and Redis, asked by clients that look at every byte of the answers.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::load::{self, Transport};
use dibs_netns::{HANG, wait_until};

use super::{Operation, Place};

/// A page, and a value.
const PAGE: usize = 4096;
const VALUE: usize = 1024;

/// A client's next request, and what the answer ends in and is to hold.
struct Question {
    request: Vec<u8>,
    answer: Expected,
}

enum Expected {
    /// Exactly this.
    All(Vec<u8>),
    /// A head of HTTP without error, and this body.
    Body(Vec<u8>),
}

pub(super) fn nginx(place: &Place<'_>) -> Result<Vec<Operation>> {
    let directory = place.directory;
    let body = page();
    std::fs::write(directory.join("index.html"), &body).context("the page")?;
    let root = directory.display();
    let _server = load::nginx(place.server, place.to.port(), &format!("root {root};"))?;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", place.to).into_bytes();
    ask(place, 64, move |_, _| Question {
        request: request.clone(),
        answer: Expected::Body(body.clone()),
    })
}

pub(super) fn redis(place: &Place<'_>) -> Result<Vec<Operation>> {
    let mut command = place.server.command("redis-server");
    command.args(["--bind", &place.to.ip().to_string()]);
    command.args(["--port", &place.to.port().to_string()]);
    command.args(["--protected-mode", "no", "--save", "", "--appendonly", "no"]);
    command.current_dir(place.directory);
    let _server = place.server.spawn(command)?;
    ask(place, 16, |client, number| {
        let value = value(client, number / 2);
        match number % 2 {
            0 => Question {
                request: [format!("SET key{client} ").as_bytes(), &value, b"\r\n"].concat(),
                answer: Expected::All(b"+OK\r\n".to_vec()),
            },
            _ => Question {
                request: format!("GET key{client}\r\n").into_bytes(),
                answer: Expected::All(
                    [format!("${VALUE}\r\n").as_bytes(), &value, b"\r\n"].concat(),
                ),
            },
        }
    })
}

fn page() -> Vec<u8> {
    (0..PAGE).map(|at| b'a' + (at * 7 % 26) as u8).collect()
}

fn value(client: usize, number: usize) -> Vec<u8> {
    (0..VALUE)
        .map(|at| b'a' + ((at + client * 5 + number) % 26) as u8)
        .collect()
}

/// Has so many clients ask, each again when it has its answer.
fn ask(
    place: &Place<'_>,
    clients: usize,
    question: impl Fn(usize, usize) -> Question + Clone + Send + 'static,
) -> Result<Vec<Operation>> {
    wait_until(HANG, "the server to listen", || {
        Transport::Tcp.connect(place.client, place.to).is_ok()
    })?;
    let start = Instant::now();
    let threads = (0..clients).map(|client| {
        let (to, span, question) = (place.to, place.span, question.clone());
        place.client.thread("client", move || {
            let mut done = Vec::new();
            let mut connection = connect(to)?;
            for number in 0.. {
                let asked = Instant::now();
                if asked - start >= span {
                    break;
                }
                let right = exchange(&mut connection, &question(client, number));
                done.push(Operation {
                    at: start.elapsed(),
                    took: asked.elapsed(),
                    failed: right.is_err(),
                });
                if right.is_err() {
                    connection = connect(to)?;
                }
            }
            anyhow::Ok(done)
        })
    });
    let threads = threads.collect::<Result<Vec<_>>>()?;
    Ok(load::join(threads)?.concat())
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(to).context("connect")?;
    stream.set_nodelay(true)?;
    let patience: Option<Duration> = Some(HANG);
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    Ok(stream)
}

fn exchange(stream: &mut TcpStream, question: &Question) -> Result<()> {
    stream.write_all(&question.request)?;
    let expected = match &question.answer {
        Expected::All(all) => all,
        Expected::Body(body) => {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte)?;
                head.push(byte[0]);
            }
            ensure!(head.starts_with(b"HTTP/1.1 200 "), "another status");
            body
        }
    };
    let mut answer = vec![0; expected.len()];
    stream.read_exact(&mut answer)?;
    ensure!(answer == *expected, "another answer");
    Ok(())
}
