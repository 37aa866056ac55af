//! Events that a server reports.

use super::*;

#[derive(Debug, Default)]
struct ObservedEvents(Mutex<Vec<String>>);

impl ExportObserver for ObservedEvents {
    fn observe(&self, export: &str, disk: &str, event: &FrontEndEvent<'_>, _: u64) {
        assert_eq!(disk, "disk");
        let description = match *event {
            FrontEndEvent::Connected { process } => format!("{} came", process.expect("it is ours")),
            FrontEndEvent::Disconnected { process, .. } => format!("{} went", process.expect("it is ours")),
            FrontEndEvent::ProtocolError { process, why } => {
                format!("{} is at fault: {why}", process.expect("it is ours"))
            }
            FrontEndEvent::Rejected { .. } => unreachable!("this server has no listener"),
            FrontEndEvent::RingBroken { ring, why } => format!("ring {ring} broke: {why}"),
            FrontEndEvent::RingRecovered { ring, .. } => format!("ring {ring} is served"),
        };
        self.0.lock().expect("the lock is not poisoned").push(format!("{export}: {description}"));
    }
}

impl ObservedEvents {
    /// Events since the last call.
    fn take_events(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("the lock is not poisoned"))
    }
}

fn observed_server() -> (Arc<VhostUserServer>, Arc<ObservedEvents>) {
    let observed = Arc::new(ObservedEvents::default());
    let export = export_of(Storage::memory(1 << 20), Limits::default(), VhostUserOffer::default());
    let observer: Arc<dyn ExportObserver> = Arc::clone(&observed) as _;
    (VhostUserServer::with_observer(observer, export), observed)
}

fn break_ring(ring: &GuestRing) {
    // More entries than the ring's size: a violation by the driver.
    ring.available.store_u16(2, 1000, std::sync::atomic::Ordering::Release);
    rustix::io::write(&ring.kick, &1_u64.to_ne_bytes()).expect("there is room");
}

#[test]
fn a_front_end_uses_the_disk_from_its_first_ring_on() {
    real(async {
        let (server, observed) = observed_server();
        SocketFrontEnd::connect(&server).await.leave().await;
        assert_eq!(observed.take_events(), [""; 0], "it has only asked");
        for _ in 0..2 {
            let front_end = SocketFrontEnd::connect(&server).await;
            let process = PeerProcess::of_peer(&front_end.socket).expect("it is ours");
            assert_eq!(server.statistics().front_end, Some(process.clone()));
            front_end.start(0, event(0), event(0)).await;
            front_end.start(1, event(0), event(0)).await;
            assert_eq!(observed.take_events(), [format!("vm1: {process} came")], "once, whatever it begins");
            front_end.leave().await;
            assert_eq!(observed.take_events(), [format!("vm1: {process} went")]);
            assert_eq!(server.statistics().front_end, None);
        }
    });
}

#[test]
fn used_time_of_a_front_end_is_transferred() {
    real(async {
        for starts_ring in [false, true] {
            let (server, _) = observed_server();
            let front_end = SocketFrontEnd::connect(&server).await;
            if starts_ring {
                front_end.start(0, event(0), event(0)).await;
            }
            assert!(server.quiesce(Duration::from_secs(60)).await);
            let (other, observed) = observed_server();
            other.adopt(server.take_quiesced().expect("it is at rest")).expect("it is the same export");
            let process = PeerProcess::of_peer(&front_end.socket).expect("it is ours");
            let front_ends = FrontEnds::call("vm1", "/nowhere".into());
            let serving = spawn_joinable(Arc::clone(&other).serve(front_ends, Threads::Here));
            other.wait_while(|other| other.connections() == 0).await;
            rustix::net::shutdown(&front_end.socket, rustix::net::Shutdown::Both).expect("it is a socket");
            other.wait_while(|other| other.connections() > 0).await;
            other.close();
            serving.await.expect("it ends in order");
            let disconnected = format!("vm1: {process} went");
            assert_eq!(observed.take_events(), if starts_ring { vec![disconnected] } else { vec![] });
            front_end.served.await;
        }
    });
}

#[test]
fn faulty_front_end_is_reported_with_its_fault() {
    real(async {
        for starts_ring in [false, true] {
            let (server, observed) = observed_server();
            let front_end = SocketFrontEnd::connect(&server).await;
            let process = PeerProcess::of_peer(&front_end.socket).expect("it is ours");
            if starts_ring {
                front_end.start(0, event(0), event(0)).await;
            }
            rustix::io::write(&front_end.socket, &[0xff; 12]).expect("there is room");
            front_end.served.await;
            let events = observed.take_events();
            let (fault, remaining) = match starts_ring {
                true => (&events[1], vec![&events[0], &events[2]]),
                false => (&events[0], vec![]),
            };
            assert!(fault.starts_with(&format!("vm1: {process} is at fault: not a message: ")), "{events:?}");
            let expected = [format!("vm1: {process} came"), format!("vm1: {process} went")];
            assert_eq!(remaining, expected.iter().collect::<Vec<_>>()[..remaining.len()], "{events:?}");
            assert_eq!(events.len(), remaining.len() + 1, "{events:?}");
        }
    });
}

#[test]
fn broken_ring_is_reported_and_its_recovery_too() {
    real(async {
        let (server, observed) = observed_server();
        let front_end = SocketFrontEnd::connect(&server).await;
        let ring = front_end.start(0, event(0), event(0)).await;
        front_end.start(1, event(0), event(0)).await;
        let _came = observed.take_events();
        break_ring(&ring);
        wait_for_signal(&ring.error).await;
        let events = observed.take_events();
        assert!(events[0].starts_with("vm1: ring 0 broke: ") && events.len() == 1, "{events:?}");
        front_end.stop(0).await;
        front_end.memory.range(0, 0x3000).expect("inside").fill(0, 0x3000, 0);
        front_end.start(0, event(0), event(0)).await;
        let events = loop {
            reactor::yield_now().await;
            match observed.take_events() {
                none if none.is_empty() => {}
                events => break events,
            }
        };
        assert_eq!(events, ["vm1: ring 0 is served"]);
        front_end.leave().await;
    });
}

#[test]
fn a_ring_that_a_front_end_leaves_broken_is_not_served_again_by_the_next() {
    real(async {
        let (server, observed) = observed_server();
        let front_end = SocketFrontEnd::connect(&server).await;
        let ring = front_end.start(0, event(0), event(0)).await;
        break_ring(&ring);
        wait_for_signal(&ring.error).await;
        front_end.leave().await;
        assert_eq!(observed.take_events().len(), 3);
        let next = SocketFrontEnd::connect(&server).await;
        next.memory.range(0, 0x3000).expect("inside").fill(0, 0x3000, 0);
        next.start(0, event(0), event(0)).await;
        next.leave().await;
        let events = observed.take_events();
        assert!(events.len() == 2 && events.iter().all(|line| !line.contains("ring")), "{events:?}");
    });
}

#[test]
fn empty_kicks_without_any_request_warn_of_unshared_memory() {
    real(async {
        let kick = |ring: &GuestRing| {
            rustix::io::write(&ring.kick, &1_u64.to_ne_bytes()).expect("there is room");
        };
        let has_warned = |server: &VhostUserServer| server.device.has_warned_of_memory.load(Relaxed);
        let (server, _) = observed_server();
        // QEMU kicks each ring that it starts, so one kick of an empty ring is normal.
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let ring = front_end.start(0, event(1), event(0)).await;
        let mut other = front_end.start(1, event(1), event(0)).await;
        while server.statistics().kicks < 2 {
            reactor::yield_now().await;
        }
        assert!(!has_warned(&server));
        // A request of this guest was received, so its memory is shared.
        front_end.request(&mut other, 1, 0, &[1; 512]);
        other.kick_and_wait().await;
        for kicks in 3..10 {
            let before = server.statistics().kicks;
            kick(&ring);
            while server.statistics().kicks == before {
                reactor::yield_now().await;
            }
            assert!(!has_warned(&server), "after {kicks} kicks");
        }
        front_end.leave().await;

        let front_end = SocketFrontEnd::connect(&server).await;
        let before = server.statistics().kicks;
        let ring = front_end.start(0, event(1), event(0)).await;
        while server.statistics().kicks == before {
            reactor::yield_now().await;
        }
        assert!(!has_warned(&server));
        kick(&ring);
        while !has_warned(&server) {
            reactor::yield_now().await;
        }
        front_end.leave().await;
        assert!(!has_warned(&server), "the next one is another machine");
    });
}
