//! State that all handlers of `--http` share.

use std::sync::Arc;

use control::events::Events;

use super::{desk::Desk, previews::Previews, watch::Watch};

pub(super) struct Site {
    pub(super) desk: Arc<Desk>,
    pub(super) previews: Previews,
    pub(super) watch: Arc<Watch>,
    pub(super) events: Events,
}
