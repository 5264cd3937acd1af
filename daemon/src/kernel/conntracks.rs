//! Sockets to ask conntrack by, which are used one after the other: to close one takes as long as the kernel needs
//! to clear away what the backstop was told to forget, some hundredths of a second.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use dibs_policy::conntrack::Conntrack;

/// Those that are kept open, at most.
const MOST_KEPT: usize = 4;

/// What conntrack is asked by, while nobody does.
#[derive(Default)]
pub(crate) struct Conntracks(RefCell<Vec<Conntrack>>);

impl Conntracks {
    /// Something to ask conntrack by.
    pub(crate) fn get(&self) -> Result<Asking<'_>, dibs_policy::Error> {
        let kept = self.0.borrow_mut().pop();
        let conntrack = Some(kept.map_or_else(Conntrack::open, Ok)?);
        Ok(Asking {
            kept: &self.0,
            conntrack,
        })
    }
}

/// One in use.
pub(crate) struct Asking<'a> {
    kept: &'a RefCell<Vec<Conntrack>>,
    conntrack: Option<Conntrack>,
}

impl Deref for Asking<'_> {
    type Target = Conntrack;

    fn deref(&self) -> &Conntrack {
        self.conntrack
            .as_ref()
            .expect("it is given back at the end")
    }
}

impl DerefMut for Asking<'_> {
    fn deref_mut(&mut self) -> &mut Conntrack {
        self.conntrack
            .as_mut()
            .expect("it is given back at the end")
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut kept = self.kept.borrow_mut();
        if kept.len() < MOST_KEPT {
            kept.extend(self.conntrack.take().filter(Conntrack::is_idle));
        }
    }
}
