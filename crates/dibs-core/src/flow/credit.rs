//! What a flow may still send in its turn (deficit round robin, RFC 8290).

/// A flow's part in the rounds. It takes part from [`begin`](Self::begin) to [`end`](Self::end).
#[derive(Debug, Default)]
pub struct Credit {
    /// Bytes. Below zero how many it sent too much: at most what a queue holds, by all paths at once.
    left: i32,
    takes_part: bool,
}

impl Credit {
    /// It takes part from now on, with a `quantum` to begin with; false if it does already.
    pub fn begin(&mut self, quantum: usize) -> bool {
        let begins = !self.takes_part;
        if begins {
            *self = Self {
                left: quantum as i32,
                takes_part: true,
            };
        }
        begins
    }

    /// It takes part no more.
    pub const fn end(&mut self) {
        self.takes_part = false;
    }

    /// Whether its turn is over.
    pub const fn is_spent(&self) -> bool {
        self.left <= 0
    }

    /// A round later.
    pub const fn refill(&mut self, quantum: usize) {
        self.left += quantum as i32;
    }

    /// So many bytes go.
    pub const fn spend(&mut self, bytes: usize) {
        self.left -= bytes as i32;
    }
}
