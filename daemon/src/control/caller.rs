//! Who asks over the control socket, and what he may see.

use dibs_control::{ErrorKind, Failure};

use crate::host::live::Live;
use crate::rulebook::rules::Rule;

/// Who asks: the uid at the other end of the socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// Its user.
    pub(crate) uid: u32,
}

impl Caller {
    pub(crate) fn is_root(self) -> bool {
        self.uid == 0
    }

    /// Members of the group see and move what is their own (docs/threat-model.md, "Keys and the host"); what only passes is root's.
    fn may(self, uid: Option<u32>) -> bool {
        self.is_root() || Some(self.uid) == uid
    }

    /// Members see the rules that concern them alone.
    pub(crate) fn sees(self, rule: &Rule) -> bool {
        self.may(rule.only_user())
    }
}

/// Whether a connection is alive, and the caller may see it.
pub(crate) fn is_visible(live: &Live, caller: Caller) -> bool {
    !live.over && caller.may(live.uid)
}

/// What a user is told of an error: one that is no [`Failure`] is that something which should work did not.
pub(crate) fn failure(error: anyhow::Error) -> Failure {
    let failed = |error| Failure::new(ErrorKind::Failed, format!("{error:#}"));
    error.downcast().unwrap_or_else(failed)
}

/// It cannot be as things are.
pub(crate) fn refused(message: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Refused, message)
}
