//! State that all handlers of `--http` share.

use std::sync::Arc;

use control::events::Events;

use super::{desk::MainThread, previews::Previews, watch::ActivityWatch};

pub(super) struct PageState {
    pub(super) desk: Arc<MainThread>,
    pub(super) previews: Previews,
    pub(super) watch: Arc<ActivityWatch>,
    pub(super) events: Events,
}
