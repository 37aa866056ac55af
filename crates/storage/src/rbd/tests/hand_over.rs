//! Hand-over of an image between processes, successful or not: acknowledged writes are kept, no two
//! processes write at once, and waiting requests complete.

use super::*;
use reactor::JoinHandle;

const ALL: [CacheMode; 5] = [
    CacheMode::Writeback,
    CacheMode::Writethrough,
    CacheMode::None,
    CacheMode::Directsync,
    CacheMode::Unsafe,
];

/// A process that has the image open.
struct Process {
    fake: FakeRbd,
    image: Rc<Align<RbdStorage<FakeRbd>>>,
    passed: PassedFiles,
}

impl Process {
    fn first(fake: FakeRbd, cache: CacheMode) -> Self {
        Self { image: Rc::new(rbd(&fake, cache, false)), fake, passed: PassedFiles::default() }
    }

    /// A new process, which may resume the image.
    fn new_process(&self) -> Self {
        let (fake, passed) = (self.fake.another_client(), PassedFiles::default());
        let cache = self.image.device().cache();
        let options =
            RbdOptions { cache, read_only: false, force_share: false, passed: Some(passed.clone()) };
        let image = Rc::new(opened(&fake, options));
        assert!(image.device().is_passed() && image.device().may_be_resumed_elsewhere());
        Self { fake, image, passed }
    }

    async fn write(&self, byte: u8) {
        self.image.write(0, full_of(byte, 512), Durability::Cached).await.expect("written");
    }

    async fn byte(&self) -> u8 {
        read(&self.image, 0, 512).await.expect("read")[0]
    }

    /// Writes in a task, as a client that cannot be paused.
    fn write_meanwhile(&self, byte: u8) -> JoinHandle<Result<()>> {
        let image = Rc::clone(&self.image);
        spawn_joinable(async move { image.write(0, full_of(byte, 512), Durability::Cached).await })
    }

    async fn suspend(&self) -> Result<()> {
        self.image.device().suspend().await
    }

    async fn resume(&self, successor: Option<&Self>) -> std::result::Result<(), OpenError> {
        let successors: Vec<_> = successor.map(|successor| successor.fake.client).into_iter().collect();
        self.image.device().resume(&successors).await
    }
}

async fn pause() {
    sleep_until(now() + Duration::from_secs(1)).await;
}

#[test]
fn suspended_image_resumes_in_another_process() {
    for (seed, cache) in (0..20).flat_map(|seed| ALL.map(|cache| (seed, cache))) {
        for has_lock in [true, false] {
            sim::run(seed, async move {
                let has_cache = !matches!(cache, CacheMode::None | CacheMode::Directsync);
                let fake = FakeRbd::new(SIZE);
                let fake = if has_cache { fake.with_cache() } else { fake };
                let fake = if has_lock { fake } else { fake.without_lock() };
                let mut current = Process::first(fake, cache);
                for byte in 1..4 {
                    let next = current.new_process();
                    // Its cache keeps the old content, if it has a cache.
                    next.byte().await;
                    current.write(byte).await;
                    let early = next.write_meanwhile(99);
                    pause().await;
                    assert!(!early.is_finished(), "a second writer");
                    early.cancel().await;
                    current.suspend().await.expect("suspended");
                    assert!(!current.fake.has_the_lock());
                    current.fake.resize_from_outside(SIZE + usize::from(byte) * OBJECT as usize);
                    next.resume(None).await.expect("resumed");
                    next.passed.take_ownership();
                    assert_eq!(next.byte().await, byte, "{cache}: the acknowledged write");
                    assert_eq!(next.image.size_bytes(), SIZE as u64 + u64::from(byte) * OBJECT);
                    assert_eq!(next.fake.has_the_lock(), has_lock);
                    // The old process is not marked as lost because of the new one.
                    current.image.device().poll_size().await.expect("no request reaches the cluster");
                    current.image.device().close().await.expect("closed");
                    assert!(!current.image.device().is_lost());
                    next.write(byte + 100).await;
                    current = next;
                }
            });
        }
    }
}

/// Failure of a new process.
#[derive(Clone, Copy, Debug, PartialEq)]
enum HandOverFailure {
    /// The image cannot be suspended for it.
    NotGiven,
    /// It closes the image before it has the lock.
    Leaves,
    /// It is killed before it has the lock.
    Dies,
    /// The cluster rejects its lock request.
    Refused,
    /// It has the lock, and closes the image.
    LeavesWithLock,
    /// It has the lock, and is killed during a write.
    DiesWithLock,
}

#[test]
fn failed_hand_over_resumes_in_the_old_process() {
    let all = [
        HandOverFailure::NotGiven,
        HandOverFailure::Leaves,
        HandOverFailure::Dies,
        HandOverFailure::Refused,
        HandOverFailure::LeavesWithLock,
        HandOverFailure::DiesWithLock,
    ];
    for (seed, failure) in (0..30).flat_map(|seed| all.map(|fails| (seed, fails))) {
        for (has_lock, cache) in
            [(true, CacheMode::None), (true, CacheMode::Writeback), (false, CacheMode::Unsafe)]
        {
            sim::run(seed, async move {
                let fake = FakeRbd::new(SIZE);
                let fake = if cache == CacheMode::None { fake } else { fake.with_cache() };
                let current = Process::first(if has_lock { fake } else { fake.without_lock() }, cache);
                for round in 1..4 {
                    current.write(round).await;
                    let successor = current.new_process();
                    if failure == HandOverFailure::NotGiven {
                        // Fails the write-back, or the release of the lock.
                        current.fake.fail_behind(u32::from(round % 2), 1, libc::EIO);
                        assert_eq!(current.suspend().await, Err(Error::IO));
                    } else {
                        current.suspend().await.expect("suspended");
                    }
                    let waiting = current.write_meanwhile(round + 100);
                    match failure {
                        HandOverFailure::NotGiven | HandOverFailure::Dies => {}
                        HandOverFailure::Leaves => successor.image.device().close().await.expect("closed"),
                        HandOverFailure::Refused => {
                            successor.fake.fail(1, libc::EIO);
                            successor.resume(None).await.expect_err("refused");
                            successor.image.device().close().await.expect("closed");
                        }
                        HandOverFailure::LeavesWithLock => {
                            successor.resume(None).await.expect("resumed");
                            successor.write(round).await;
                            successor.image.device().close().await.expect("closed");
                        }
                        HandOverFailure::DiesWithLock => {
                            successor.resume(None).await.expect("resumed");
                            successor.fake.stop_answering();
                            let in_flight = successor.write_meanwhile(99);
                            pause().await;
                            drop(in_flight);
                        }
                    }
                    let cluster = successor.fake.clone();
                    let late_completion = spawn_joinable(async move {
                        pause().await;
                        cluster.resume_answering();
                    });
                    let ended_successor =
                        if failure == HandOverFailure::NotGiven { None } else { Some(&successor) };
                    current.resume(ended_successor).await.expect("resumed");
                    late_completion.await;
                    assert_eq!(waiting.await, Ok(()), "{failure:?}: waiting requests see no error");
                    pause().await;
                    assert_eq!(current.byte().await, round + 100, "{failure:?}");
                    assert!(!current.image.device().is_lost(), "{failure:?}");
                    let dies = matches!(failure, HandOverFailure::Dies | HandOverFailure::DiesWithLock);
                    assert_eq!(successor.fake.is_blocklisted(), dies, "{failure:?}");
                }
                // A later hand-over succeeds.
                let successor = current.new_process();
                current.suspend().await.expect("suspended");
                successor.resume(None).await.expect("resumed");
                assert_eq!(successor.byte().await, 103);
            });
        }
    }
}

#[test]
fn image_locked_by_a_third_client_is_lost() {
    for seed in 0..20 {
        sim::run(seed, async {
            let current = Process::first(FakeRbd::new(SIZE), CacheMode::None);
            let (successor, third) = (current.new_process(), current.fake.another_client());
            current.suspend().await.expect("suspended");
            assert!(third.acquire_free_lock());
            let waiting = current.write_meanwhile(1);
            let why = successor.resume(None).await.expect_err("it is another's").to_string();
            assert!(why.contains("another client has taken its lock: 127.0.0.1:0/2"), "{why}");
            assert!(!successor.image.device().is_lost(), "the new process never held the lock");
            let why = current.resume(Some(&successor)).await.expect_err("it is another's").to_string();
            assert!(why.contains("another client has taken its lock"), "{why}");
            assert!(current.image.device().is_lost());
            assert_eq!(waiting.await, Err(Error::IO), "waiting requests fail");
            assert!(!third.is_blocklisted() && third.has_the_lock());
        });
    }
}

#[test]
fn hung_cluster_delays_only_writers() {
    sim::run(1, async {
        let current = Process::first(FakeRbd::new(SIZE), CacheMode::None);
        let successor = current.new_process();
        current.write(1).await;
        let suspending = {
            let image = Rc::clone(&current.image);
            let suspending = async move { image.device().suspend().await };
            spawn_joinable(reactor::timeout(Duration::from_secs(5), suspending))
        };
        while current.image.device().ownership.is_ours() {
            sleep_until(now() + Duration::from_micros(1)).await;
        }
        current.fake.stop_answering();
        // The caller times out, and the suspension continues.
        assert!(suspending.await.is_err());
        let began = now();
        successor.resume(None).await.expect_err("the other process continues");
        assert_eq!(now() - began, RESUME_TIMEOUT);
        let waiting = current.write_meanwhile(2);
        let resuming = {
            let (image, successor) = (Rc::clone(&current.image), successor.fake.client);
            spawn_joinable(async move { image.device().resume(&[successor]).await })
        };
        pause().await;
        assert!(!resuming.is_finished() && !waiting.is_finished());
        let oldest = current.image.device().oldest_request().expect("it is seen");
        assert!(oldest >= Duration::from_millis(900), "{oldest:?}");
        current.fake.resume_answering();
        resuming.await.expect("resumed");
        assert_eq!(waiting.await, Ok(()));
        assert_eq!(current.byte().await, 2);
    });
}

#[test]
fn read_only_image_is_not_suspended() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = rbd(&fake, CacheMode::None, true);
        image.device().suspend().await.expect("nothing is done");
        image.device().resume(&[]).await.expect("nothing is done");
        assert!(fake.has_the_lock() && read(&image, 0, 512).await.is_ok());
    });
}
