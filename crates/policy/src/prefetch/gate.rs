//! The gate: decides if read-ahead is worth its cost, and bounds that cost until this is known.
//!
//! ```text
//!   bytes that readers requested   × 1/64 ─┐
//!   bytes read ahead and used      × 1/8  ─┴─► credit ──► advanced to new streams, returned when used
//!                                                 └─────► bytes that were never read
//! ```
//!
//! A new stream is on trial until it has used twice the minimum window plus as much as was wasted
//! on it. Read-ahead on trial is paid from a credit; used data is returned with interest. If
//! streams keep ending as soon as they are detected, the credit is exhausted and the gate closes;
//! requested bytes refill it, so read-ahead is tried again. Streams past their trial are not
//! affected by a closed gate.

/// Lower bound of the maximum credit, in bytes: the default memory of a cache. Larger caches have a
/// larger maximum, so that as many streams as fit can start at once.
const MIN_CREDIT: u64 = 4 << 20;
/// Fraction (1 / n) of the requested bytes that may be wasted: 1.6 % more I/O at most.
const REQUESTED_FRACTION: u64 = 64;
/// Interest on used data, as a fraction (1 / n).
const USED_FRACTION: u64 = 8;

#[derive(Debug)]
pub(super) struct ReadAheadGate {
    credit: i64,
    max_credit: i64,
    /// Requested bytes that have not yet added up to a byte of credit.
    remainder: u64,
}

impl ReadAheadGate {
    pub(super) fn new(memory_bytes: u64) -> Self {
        let max_credit = memory_bytes.max(MIN_CREDIT).cast_signed();
        Self { credit: max_credit, max_credit, remainder: 0 }
    }

    pub(super) fn resize(&mut self, memory_bytes: u64) {
        self.max_credit = memory_bytes.max(MIN_CREDIT).cast_signed();
        self.credit = self.credit.min(self.max_credit);
    }

    pub(super) fn count_requested(&mut self, bytes: u64) {
        let total = self.remainder + bytes;
        self.remainder = total % REQUESTED_FRACTION;
        self.add_credit(total / REQUESTED_FRACTION);
    }

    /// True if `bytes` may be read ahead on trial.
    pub(super) fn is_open_for(&self, bytes: u64) -> bool {
        // A window above the maximum credit is admitted at full credit; otherwise it never would
        // be.
        self.credit >= bytes.cast_signed().min(self.max_credit)
    }

    pub(super) fn charge_trial(&mut self, bytes: u64) {
        self.credit -= bytes.cast_signed();
    }

    pub(super) fn count_used(&mut self, bytes: u64, on_trial: bool) {
        self.add_credit(bytes / USED_FRACTION + if on_trial { bytes } else { 0 });
    }

    /// Charges wasted bytes, except on trial, when `charge_trial` has charged them already.
    pub(super) fn count_wasted(&mut self, bytes: u64, on_trial: bool) {
        if !on_trial {
            self.credit = (self.credit - bytes.cast_signed()).max(-self.max_credit);
        }
    }

    fn add_credit(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add_unsigned(bytes).min(self.max_credit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 128 << 10;

    fn charge_wasted_trial(gate: &mut ReadAheadGate) -> bool {
        let is_open = gate.is_open_for(WINDOW);
        if is_open {
            gate.charge_trial(WINDOW);
            gate.count_wasted(WINDOW, true);
        }
        is_open
    }

    #[test]
    fn gate_closes_without_use_and_retries_for_one_byte_in_64() {
        let mut gate = ReadAheadGate::new(0);
        while charge_wasted_trial(&mut gate) {}
        let mut tries = 0;
        for _ in 0..64_000 {
            gate.count_requested(16 << 10);
            tries += u64::from(charge_wasted_trial(&mut gate));
        }
        assert_eq!(tries, 64_000 * (16 << 10) / 64 / WINDOW);
    }

    #[test]
    fn used_data_earns_interest() {
        let mut gate = ReadAheadGate::new(0);
        while charge_wasted_trial(&mut gate) {}
        gate.count_requested(64 * WINDOW);
        for _ in 0..8 {
            assert!(gate.is_open_for(WINDOW));
            gate.charge_trial(WINDOW);
            gate.count_used(WINDOW, true);
        }
        assert!(gate.is_open_for(2 * WINDOW - 1));
    }
}
