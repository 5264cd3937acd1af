//! Requests to the daemons of peers, and their answers.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use dibs_switch::messages::{ANSWER_TIMEOUT, Body, Message, Outcome, Unanswered};
use tokio::sync::oneshot;

use crate::data::{Driver, Gone};

/// What is answered of each thing that a request names.
pub(crate) type Outcomes = Vec<(Outcome, u64)>;

/// Sends requests, and keeps who waits for their answers. Commands: [`ask`](Self::ask) and
/// [`answer`](Self::answer); inputs: [`count_malformed`](Self::count_malformed) and [`handle_answer`](Self::handle_answer).
pub(crate) struct Rpc {
    driver: Driver,
    waiting: RefCell<HashMap<u32, Waiting>>,
    next_request: Cell<u32>,
    next_sequence: Cell<u64>,
    /// Messages that are none.
    malformed: Cell<u64>,
    /// Answers for which their peer's messages do not make room.
    dropped: Cell<u64>,
}

/// Who waits for a peer's answer.
struct Waiting {
    peer: usize,
    answer: oneshot::Sender<Outcomes>,
}

impl From<Gone> for Unanswered {
    fn from(_: Gone) -> Self {
        Self::Ended
    }
}

impl Rpc {
    /// Requests are numbered from `first`.
    pub(crate) fn new(driver: Driver, first: u32) -> Self {
        Self {
            driver,
            waiting: RefCell::default(),
            next_request: Cell::new(first),
            next_sequence: Cell::new(1),
            malformed: Cell::default(),
            dropped: Cell::default(),
        }
    }

    /// Asks a peer's daemon, and waits for the answer.
    pub(crate) async fn ask(&self, peer: usize, body: Body) -> Result<Outcomes, Unanswered> {
        let request = self.next_request.get();
        self.next_request.set(request.wrapping_add(1));
        let (answer, answered) = oneshot::channel();
        let waiting = Waiting { peer, answer };
        self.waiting.borrow_mut().insert(request, waiting);
        let asked = async {
            self.post(peer, Message { request, body }).await?;
            match tokio::time::timeout(ANSWER_TIMEOUT, answered).await {
                Ok(Ok(outcomes)) => Ok(outcomes),
                _ => Err(Unanswered::Silent),
            }
        };
        let answer = asked.await;
        self.waiting.borrow_mut().remove(&request);
        answer
    }

    /// The sequence of the next WANT or SILENT.
    pub(crate) fn next_sequence(&self) -> u64 {
        let next = self.next_sequence.get();
        self.next_sequence.replace(next + 1)
    }

    /// Answers a request of a peer's daemon.
    pub(crate) async fn answer(&self, peer: usize, request: u32, outcomes: Outcomes) {
        let body = Body::Answer(outcomes);
        if let Err(error) = self.post(peer, Message { request, body }).await {
            if error == Unanswered::Full {
                self.dropped.update(|count| count + 1);
            }
            tracing::debug!(peer, "no answer sent: {error}");
        }
    }

    async fn post(&self, peer: usize, message: Message) -> Result<(), Unanswered> {
        let sent = self.driver.send_control(peer, message).await?;
        sent.map_err(Unanswered::from)
    }

    /// A peer's daemon sent bytes that are no message.
    pub(crate) fn count_malformed(&self, peer: usize) {
        self.malformed.update(|count| count + 1);
        tracing::debug!(peer, "message dropped: malformed");
    }

    /// Hands an answer to whoever asked.
    pub(crate) fn handle_answer(&self, peer: usize, request: u32, outcomes: Outcomes) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting
            .get(&request)
            .is_some_and(|asked| asked.peer == peer)
        {
            let asked = waiting.remove(&request).expect("it was just seen");
            // Who asked may have given up.
            let _ = asked.answer.send(outcomes);
        }
    }

    /// For `status`, by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 2] {
        [
            ("messages_malformed", self.malformed.get()),
            ("messages_dropped", self.dropped.get()),
        ]
    }
}
