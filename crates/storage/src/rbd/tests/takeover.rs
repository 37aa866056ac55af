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
    fake: Fake,
    image: Rc<Align<Rbd<Fake>>>,
    passed: Passed,
}

impl Process {
    fn first(fake: Fake, cache: CacheMode) -> Self {
        Self { image: Rc::new(rbd(&fake, cache, false)), fake, passed: Passed::default() }
    }

    /// A new process, which may resume the image.
    fn heir(&self) -> Self {
        let (fake, passed) = (self.fake.another(), Passed::default());
        let cache = self.image.device().cache();
        let how = How { cache, read_only: false, force_share: false, passed: Some(passed.clone()) };
        let image = Rc::new(opened(&fake, how));
        assert!(image.device().is_passed() && image.device().is_anothers());
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

    async fn lay_down(&self) -> Result<()> {
        self.image.device().lay_down().await
    }

    async fn take_up(&self, heir: Option<&Self>) -> std::result::Result<(), OpenError> {
        let heirs: Vec<_> = heir.map(|heir| heir.fake.client).into_iter().collect();
        self.image.device().take_up(&heirs).await
    }
}

async fn pause() {
    sleep_until(now() + Duration::from_secs(1)).await;
}

#[test]
fn what_one_lays_down_another_goes_on_with() {
    for (seed, cache) in (0..20).flat_map(|seed| ALL.map(|cache| (seed, cache))) {
        for has_lock in [true, false] {
            sim::run(seed, async move {
                let has_cache = !matches!(cache, CacheMode::None | CacheMode::Directsync);
                let fake = Fake::new(SIZE);
                let fake = if has_cache { fake.with_cache() } else { fake };
                let fake = if has_lock { fake } else { fake.without_lock() };
                let mut current = Process::first(fake, cache);
                for byte in 1..4 {
                    let next = current.heir();
                    // Its cache keeps the old content, if it has a cache.
                    next.byte().await;
                    current.write(byte).await;
                    let early = next.write_meanwhile(99);
                    pause().await;
                    assert!(!early.is_finished(), "a second writer");
                    early.cancel().await;
                    current.lay_down().await.expect("laid down");
                    assert!(!current.fake.has_the_lock());
                    current.fake.resize_from_outside(SIZE + usize::from(byte) * OBJECT as usize);
                    next.take_up(None).await.expect("taken up");
                    next.passed.settle();
                    assert_eq!(next.byte().await, byte, "{cache}: what was answered");
                    assert_eq!(next.image.size_bytes(), SIZE as u64 + u64::from(byte) * OBJECT);
                    assert_eq!(next.fake.has_the_lock(), has_lock);
                    // The old process is not marked as lost because of the new one.
                    current.image.device().look_again().await.expect("nobody is asked");
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
enum Fails {
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
fn where_the_other_comes_to_nothing_all_goes_on_as_if_nothing_had_been() {
    let all = [
        Fails::NotGiven,
        Fails::Leaves,
        Fails::Dies,
        Fails::Refused,
        Fails::LeavesWithLock,
        Fails::DiesWithLock,
    ];
    for (seed, fails) in (0..30).flat_map(|seed| all.map(|fails| (seed, fails))) {
        for (has_lock, cache) in
            [(true, CacheMode::None), (true, CacheMode::Writeback), (false, CacheMode::Unsafe)]
        {
            sim::run(seed, async move {
                let fake = Fake::new(SIZE);
                let fake = if cache == CacheMode::None { fake } else { fake.with_cache() };
                let current = Process::first(if has_lock { fake } else { fake.without_lock() }, cache);
                for round in 1..4 {
                    current.write(round).await;
                    let heir = current.heir();
                    if fails == Fails::NotGiven {
                        // Fails the write-back, or the release of the lock.
                        current.fake.fail_behind(u32::from(round % 2), 1, libc::EIO);
                        assert_eq!(current.lay_down().await, Err(Error::IO));
                    } else {
                        current.lay_down().await.expect("laid down");
                    }
                    let waiting = current.write_meanwhile(round + 100);
                    match fails {
                        Fails::NotGiven | Fails::Dies => {}
                        Fails::Leaves => heir.image.device().close().await.expect("closed"),
                        Fails::Refused => {
                            heir.fake.fail(1, libc::EIO);
                            heir.take_up(None).await.expect_err("refused");
                            heir.image.device().close().await.expect("closed");
                        }
                        Fails::LeavesWithLock => {
                            heir.take_up(None).await.expect("taken up");
                            heir.write(round).await;
                            heir.image.device().close().await.expect("closed");
                        }
                        Fails::DiesWithLock => {
                            heir.take_up(None).await.expect("taken up");
                            heir.fake.stand_still();
                            let under_way = heir.write_meanwhile(99);
                            pause().await;
                            drop(under_way);
                        }
                    }
                    let cluster = heir.fake.clone();
                    let lands_late = spawn_joinable(async move {
                        pause().await;
                        cluster.go_on();
                    });
                    let gone = if fails == Fails::NotGiven { None } else { Some(&heir) };
                    current.take_up(gone).await.expect("taken up");
                    lands_late.await;
                    assert_eq!(waiting.await, Ok(()), "{fails:?}: who waits sees no error");
                    pause().await;
                    assert_eq!(current.byte().await, round + 100, "{fails:?}");
                    assert!(!current.image.device().is_lost(), "{fails:?}");
                    let dies = matches!(fails, Fails::Dies | Fails::DiesWithLock);
                    assert_eq!(heir.fake.is_shut_out(), dies, "{fails:?}");
                }
                // A later hand-over succeeds.
                let heir = current.heir();
                current.lay_down().await.expect("laid down");
                heir.take_up(None).await.expect("taken up");
                assert_eq!(heir.byte().await, 103);
            });
        }
    }
}

#[test]
fn an_image_whose_lock_somebody_else_has_taken_is_lost_and_nobody_is_shut_out_for_it() {
    for seed in 0..20 {
        sim::run(seed, async {
            let current = Process::first(Fake::new(SIZE), CacheMode::None);
            let (heir, third) = (current.heir(), current.fake.another());
            current.lay_down().await.expect("laid down");
            assert!(third.grab());
            let waiting = current.write_meanwhile(1);
            let why = heir.take_up(None).await.expect_err("it is another's").to_string();
            assert!(why.contains("another client has taken its lock: 127.0.0.1:0/2"), "{why}");
            assert!(!heir.image.device().is_lost(), "it never was the heir's");
            let why = current.take_up(Some(&heir)).await.expect_err("it is another's").to_string();
            assert!(why.contains("another client has taken its lock"), "{why}");
            assert!(current.image.device().is_lost());
            assert_eq!(waiting.await, Err(Error::IO), "who waits is told");
            assert!(!third.is_shut_out() && third.has_the_lock());
        });
    }
}

#[test]
fn a_cluster_that_stands_still_keeps_who_writes_waiting_and_nothing_else() {
    sim::run(1, async {
        let current = Process::first(Fake::new(SIZE), CacheMode::None);
        let heir = current.heir();
        current.write(1).await;
        let laying = {
            let image = Rc::clone(&current.image);
            let laying = async move { image.device().lay_down().await };
            spawn_joinable(reactor::timeout(Duration::from_secs(5), laying))
        };
        while current.image.device().turn.is_ours() {
            sleep_until(now() + Duration::from_micros(1)).await;
        }
        current.fake.stand_still();
        // The caller times out, and the suspension continues.
        assert!(laying.await.is_err());
        let began = now();
        heir.take_up(None).await.expect_err("the other goes on");
        assert_eq!(now() - began, TO_TAKE);
        let waiting = current.write_meanwhile(2);
        let taking = {
            let (image, heir) = (Rc::clone(&current.image), heir.fake.client);
            spawn_joinable(async move { image.device().take_up(&[heir]).await })
        };
        pause().await;
        assert!(!taking.is_finished() && !waiting.is_finished());
        let oldest = current.image.device().oldest_request().expect("it is seen");
        assert!(oldest >= Duration::from_millis(900), "{oldest:?}");
        current.fake.go_on();
        taking.await.expect("taken up");
        assert_eq!(waiting.await, Ok(()));
        assert_eq!(current.byte().await, 2);
    });
}

#[test]
fn who_only_reads_gives_nothing_up() {
    sim::run(1, async {
        let fake = Fake::new(SIZE);
        let image = rbd(&fake, CacheMode::None, true);
        image.device().lay_down().await.expect("nothing is done");
        image.device().take_up(&[]).await.expect("nothing is done");
        assert!(fake.has_the_lock() && read(&image, 0, 512).await.is_ok());
    });
}
