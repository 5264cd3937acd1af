//! The users' side: whose turn it is, and who was let go.

pub(crate) mod caller;
pub(crate) mod events;
pub(crate) mod metrics;
pub(crate) mod socket;
pub(crate) mod turns;

use std::cell::Cell;

use dibs_control::Failure;

use crate::control::caller::Caller;
use crate::control::turns::{MemberTurn, Turn, Turns};

/// Clients of one uid that are served at once, and what they have looked up: they cannot keep other members out.
pub(crate) const CLIENTS_OF_UID: usize = 8;
/// Changes that a member of the group may have under way.
const CHANGES_OF_UID: usize = 4;

/// How many clients of members of the group were let go.
#[derive(Debug, Default)]
pub(crate) struct TurnedAway {
    /// For want of a place.
    pub(crate) refused: Cell<u64>,
    /// As they asked nothing, or did not read what they were told.
    pub(crate) idle: Cell<u64>,
}

/// Gives users their turns. A request waits for [`admit`](Self::admit), what the daemon changes by itself for
/// [`own_turn`](Self::own_turn); what peers ask waits for neither.
pub(crate) struct Users {
    /// Taken while a request changes something.
    changes: Turns,
    /// Taken while a member of the group is told what is found out for him.
    looks: Turns,
    turned_away: TurnedAway,
}

/// A request is served until this is dropped.
pub(crate) type Admitted<'a> = (Option<Turn<'a>>, Option<MemberTurn<'a>>);

impl Default for Users {
    fn default() -> Self {
        Self {
            changes: Turns::new(CHANGES_OF_UID),
            looks: Turns::new(CLIENTS_OF_UID),
            turned_away: TurnedAway::default(),
        }
    }
}

impl Users {
    /// Waits for the turn of a request.
    ///
    /// # Errors
    /// A member of the group has too much under way.
    pub(crate) async fn admit(
        &self,
        caller: Caller,
        changes: bool,
    ) -> Result<Admitted<'_>, Failure> {
        Ok(match changes {
            true => (Some(self.changes.take(caller).await?), None),
            false => (None, self.looks.member(caller).await?),
        })
    }

    /// Waits for a turn to change something that nobody asked for.
    pub(crate) async fn own_turn(&self) -> Turn<'_> {
        self.changes.own().await
    }

    /// Counts who is let go.
    pub(crate) fn turned_away(&self) -> &TurnedAway {
        &self.turned_away
    }

    /// For `status`, by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 3] {
        [
            ("changes_refused", self.changes.refused()),
            ("clients_refused", self.turned_away.refused.get()),
            ("clients_idle", self.turned_away.idle.get()),
        ]
    }
}
