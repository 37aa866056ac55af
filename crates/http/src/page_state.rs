//! State that all handlers of `--http` share.

use std::sync::Arc;

use control::events::EventLog;

use super::{activity::ActivityWatch, main_thread::MainThread, preview_thread::Previews};

pub(super) struct PageState {
    pub(super) main_thread: Arc<MainThread>,
    pub(super) previews: Previews,
    pub(super) watch: Arc<ActivityWatch>,
    pub(super) events: EventLog,
}
