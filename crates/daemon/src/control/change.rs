//! What happened to the things that run. A listener is called at once, on the main thread, after
//! the change is done: it may look at the inventory.

use std::{cell::RefCell, rc::Rc};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Its last client is gone.
    ExportDeleted { id: String },
    /// A disk or a group came or went.
    Listed { name: String },
    /// A disk or a group has other limits, another weight, another group.
    SettingsChanged { name: String },
}

type Listener = Rc<dyn Fn(&Change)>;

#[derive(Default)]
pub(crate) struct Listeners(RefCell<Vec<Listener>>);

impl Listeners {
    pub(crate) fn add(&self, listener: impl Fn(&Change) + 'static) {
        self.0.borrow_mut().push(Rc::new(listener));
    }

    pub(crate) fn tell(&self, change: &Change) {
        // A copy, for a listener may add another.
        let listeners = self.0.borrow().clone();
        for listener in listeners {
            listener(change);
        }
    }
}
