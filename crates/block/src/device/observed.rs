//! A device that a watermark looks at: how much of it is in use, and what follows for limits.
//!
//! It serves weir's own disks, through the sampler, and control groups. Never guesses: while the
//! statistics of the device cannot be read, nothing follows, and that is reported once.

use std::sync::Arc;

use policy::{
    throttle::Enforcement,
    time::Instant,
    watermark::{Consumed, Controller, Sample, Watermark},
};

use super::{Device, Meter};

/// A device, and the controller that decides by its use.
#[derive(Debug)]
pub struct Observed {
    device: Arc<Device>,
    meter: Meter,
    controller: Controller,
    failing: bool,
}

impl Observed {
    /// One that nothing is known of yet; says how its use will be told.
    pub fn new(device: Arc<Device>) -> Self {
        let source = device.capacity_source();
        let capacity = device.capacity().unwrap_or_default();
        tracing::info!(
            device = device.name(),
            %source,
            read_iops = capacity.read_iops,
            write_iops = capacity.write_iops,
            read_bps = capacity.read_bps,
            write_bps = capacity.write_bps,
            "watermarks look at this device"
        );
        Self { device, meter: Meter::default(), controller: Controller::new(), failing: false }
    }

    /// Takes in what the device did, and what all with a watermark took of it.
    pub fn observe(&mut self, now: Instant, consumed: &Consumed) {
        match self.meter.measure(&self.device, now) {
            Ok(Some(used)) => {
                self.failing = false;
                self.controller.observe(now, Sample::new(used.into(), consumed));
            }
            Ok(None) => {}
            Err(error) => {
                if !self.failing {
                    tracing::warn!(
                        device = self.device.name(),
                        %error,
                        "the device's statistics cannot be read; limits with a watermark are enforced"
                    );
                }
                self.failing = true;
            }
        }
    }

    /// How much of it is in use, in thousandths, smoothed.
    pub fn used(&self) -> u64 {
        self.controller.used()
    }

    /// How limits with this watermark are to be enforced; `None` while nothing is known.
    pub fn enforcement(&mut self, watermark: Watermark) -> Option<Enforcement> {
        (!self.failing).then(|| self.controller.enforcement(watermark))
    }
}
