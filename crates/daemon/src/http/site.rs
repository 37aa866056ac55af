//! What every answer at `--http` may need.

use std::sync::Arc;

use super::{desk::Desk, previews::Previews, watch::Watch};
use crate::events::Events;

pub(super) struct Site {
    pub(super) desk: Arc<Desk>,
    pub(super) previews: Previews,
    pub(super) watch: Arc<Watch>,
    pub(super) events: Events,
}
