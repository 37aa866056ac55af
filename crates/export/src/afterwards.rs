//! What is done once clients have gone.

use std::cell::Cell;

use policy::time::Duration;
use reactor::buffer;

/// How long after the last has gone.
const MOMENT: Duration = Duration::from_secs(1);

/// A moment later, gives back what this thread used for them: an allocator keeps it between what
/// others use, and ten thousand clients that came and went would have left 300 MiB.
pub(crate) fn give_memory_back() {
    thread_local! { static SOON: Cell<bool> = const { Cell::new(false) } }
    if SOON.replace(true) {
        return;
    }
    reactor::spawn(async {
        reactor::sleep_until(reactor::now() + MOMENT).await;
        SOON.set(false);
        buffer::trim();
    });
}
