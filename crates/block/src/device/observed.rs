//! A device with a watermark controller: its utilization, and the resulting enforcement of limits.
//!
//! It serves weir's own disks, through the sampler, and control groups. Never guesses: while the
//! statistics of the device cannot be read there is no result, and that is logged once.

use std::sync::Arc;

use policy::{
    throttle::Enforcement,
    time::Instant,
    watermark::{DeviceConsumption, UtilizationSample, Watermark, WatermarkController},
};

use super::{Device, UtilizationMeter};

/// A device and its controller.
#[derive(Debug)]
pub struct DeviceObserver {
    device: Arc<Device>,
    meter: UtilizationMeter,
    controller: WatermarkController,
    failing: bool,
}

impl DeviceObserver {
    /// Creates it without observations; logs the source of the capacity.
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
            "watermarks observe this device"
        );
        Self {
            device,
            meter: UtilizationMeter::default(),
            controller: WatermarkController::new(),
            failing: false,
        }
    }

    /// Adds an observation: the device's utilization, and the consumption of all targets with a
    /// watermark.
    pub fn observe(&mut self, now: Instant, consumed: &DeviceConsumption) {
        match self.meter.measure(&self.device, now) {
            Ok(Some(used)) => {
                self.failing = false;
                self.controller.observe(now, UtilizationSample::new(used.into(), consumed));
            }
            Ok(None) => {}
            Err(error) => {
                // Logged once in each outage.
                if !self.failing {
                    tracing::warn!(
                        device = self.device.name(),
                        %error,
                        "the device's statistics cannot be read: limits with a watermark are enforced"
                    );
                }
                self.failing = true;
            }
        }
    }

    /// Smoothed utilization, in thousandths.
    pub fn used(&self) -> u64 {
        self.controller.utilization()
    }

    /// Enforcement of limits with this watermark; `None` while the device cannot be read.
    pub fn enforcement(&mut self, watermark: Watermark) -> Option<Enforcement> {
        (!self.failing).then(|| self.controller.enforcement(watermark))
    }
}
