//! Restarts a failed watch with a new list, after a back-off.

use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event};
use tokio::time::{Instant, sleep_until};

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(8);
/// Pause before an empty list is repeated. It doubles each time.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// Number of empty lists until the result is accepted, after ten minutes.
const LOOKS: u32 = 7;

/// Back-off of half a second that doubles up to eight, with jitter in the upper half. A success resets it.
/// kube's default grows to 30 s and resets only after two minutes. After an outage, the first response is
/// often an expired `resourceVersion`, so recovery would take that long again.
#[derive(Debug, Default)]
pub struct WatchBackoff {
    failures: u32,
}

fn pause(failures: u32, jitter: f64) -> Duration {
    let full = FIRST.saturating_mul(1 << failures.min(10)).min(LONGEST);
    full / 2 + full.mul_f64(jitter / 2.0)
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = pause(self.failures, rand::random());
        self.failures = self.failures.saturating_add(1);
        Some(pause)
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Returns the events of the watch that `open` creates. Creates another one after each failure.
///
/// Unlike this function, kube's own watcher resumes at the last `resourceVersion`. That is wrong if etcd was
/// restored from a backup: the version is then in the future. The watch receives no events until the server
/// reaches that version, and the changes before it are lost. The watcher also never leaves a
/// `resourceVersion` that the server rejects as too old before the stream starts. And its back-off does not
/// grow, because it counts the start of a list, before the request, as a success.
///
/// If the process may list but not watch, or no watch gets through, this function lists at least every eight
/// seconds. A watch counts as a success after its first event, or after it was open for that long.
///
/// After an empty list that follows a non-empty one, this function lists again later. The server may not have
/// known all objects yet, and a watch never reports unchanged ones.
pub fn listed_anew<K, W>(
    open: impl Fn() -> W + Send + 'static,
) -> BoxStream<'static, watcher::Result<Event<K>>>
where
    K: Send + 'static,
    W: Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
{
    struct State<K, O> {
        open: O,
        events: Option<BoxStream<'static, watcher::Result<Event<K>>>>,
        pauses: WatchBackoff,
        failed: bool,
        /// Time since which the list is complete.
        whole: Option<Instant>,
        /// Number of consecutive complete lists without a successful watch. A complete list resets the
        /// earlier failures, because the first response after an outage is often another failure.
        unwatched: u32,
        doubt: Doubt,
    }
    impl<K, O> State<K, O> {
        fn fails(&mut self) {
            (self.events, self.failed) = (None, true);
            if let Some(since) = self.whole.take() {
                if since.elapsed() >= LONGEST {
                    self.unwatched = 0;
                }
                self.pauses.failures = self.unwatched;
                self.unwatched += 1;
            }
        }
    }
    let state = State {
        open,
        events: None,
        pauses: WatchBackoff::default(),
        failed: false,
        whole: None,
        unwatched: 0,
        doubt: Doubt::default(),
    };
    stream::unfold(state, |mut this| async move {
        loop {
            let Some(events) = &mut this.events else {
                let pause = this.failed.then(|| this.pauses.next()).flatten();
                tokio::time::sleep(pause.unwrap_or_default()).await;
                this.events = Some((this.open)().boxed());
                continue;
            };
            let next = tokio::select! {
                next = events.next() => next,
                () = this.doubt.is_due() => {
                    (this.events, this.failed) = (None, false);
                    continue;
                }
            };
            match next {
                Some(Ok(event)) => {
                    match event {
                        Event::Init | Event::InitApply(_) => {}
                        Event::InitDone => this.whole = Some(Instant::now()),
                        Event::Apply(_) | Event::Delete(_) => {
                            this.pauses.reset();
                            this.unwatched = 0;
                        }
                    }
                    this.doubt.see(&event);
                    return Some((Ok(event), this));
                }
                Some(Err(error)) => {
                    this.fails();
                    return Some((Err(error), this));
                }
                None => this.fails(),
            }
        }
    })
    .boxed()
}

/// Decides whether an empty list needs another check.
#[derive(Debug, Default)]
struct Doubt {
    /// Whether an earlier list had objects.
    had: bool,
    listed: bool,
    /// Number of empty lists since then.
    empty: u32,
    again: Option<Instant>,
}

impl Doubt {
    fn see<K>(&mut self, event: &Event<K>) {
        match event {
            Event::Init => (self.listed, self.again) = (false, None),
            Event::InitApply(_) => self.listed = true,
            Event::InitDone if self.listed => (self.had, self.empty) = (true, 0),
            Event::InitDone if self.had && self.empty < LOOKS => {
                let pause = LOOK_AGAIN * (1 << self.empty);
                self.empty += 1;
                self.again = Some(Instant::now() + pause);
            }
            Event::InitDone => *self = Self::default(),
            // An event shows that the server knows objects.
            Event::Apply(_) => self.had = true,
            Event::Delete(_) => {}
        }
    }

    async fn is_due(&self) {
        match self.again {
            Some(again) => sleep_until(again).await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn failure() -> watcher::Result<Event<u8>> {
        Err(watcher::Error::NoResourceVersion)
    }

    #[tokio::test(start_paused = true)]
    async fn failed_list_is_relisted_with_backoff_until_complete() {
        let failing = || vec![Ok(Event::Init), Ok(Event::InitApply(1)), failure()];
        // In reverse order.
        let whole = || vec![Ok(Event::Init), Ok(Event::InitDone), Ok(Event::Apply(2))];
        let watches = Mutex::new(vec![
            whole(),
            whole().into_iter().chain([failure()]).collect(),
            failing(),
            failing(),
            failing(),
            failing(),
        ]);
        let mut events = listed_anew(move || {
            let events = watches.lock().unwrap().pop().unwrap_or_default();
            stream::iter(events).chain(stream::pending())
        });
        let mut pauses = Vec::new();
        let mut before = tokio::time::Instant::now();
        let mut seen = String::new();
        while pauses.len() < 6 {
            let event = events.next().await.unwrap();
            if matches!(event, Ok(Event::Init)) {
                pauses.push(before.elapsed());
            }
            before = tokio::time::Instant::now();
            seen.push(match event {
                Ok(Event::Init) => 'i',
                Ok(Event::InitApply(_)) => 'o',
                Ok(Event::InitDone) => 'd',
                Ok(_) => 'a',
                Err(_) => '!',
            });
        }
        assert_eq!(seen, "io!io!io!io!ida!i");
        assert_eq!(pauses[0], Duration::ZERO);
        for (failures, pause) in pauses[1..5].iter().enumerate() {
            let full = FIRST * (1 << failures);
            assert!(*pause >= full / 2 && *pause <= full, "{pauses:?}");
        }
        assert!(pauses[5] <= FIRST, "from the start again: {pauses:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn relist_backs_off_when_watch_always_fails() {
        let mut events = listed_anew(|| {
            let events = [
                Ok(Event::Init),
                Ok(Event::InitApply(1)),
                Ok(Event::InitDone),
            ];
            stream::iter(events.into_iter().chain([failure()]))
        });
        let (mut lists, began) = (0, Instant::now());
        while began.elapsed() < Duration::from_secs(600) {
            lists += u32::from(matches!(events.next().await, Some(Ok(Event::InitDone))));
        }
        assert!((75..170).contains(&lists), "{lists} in ten minutes");
    }

    #[tokio::test(start_paused = true)]
    async fn complete_list_after_outage_resets_watch_backoff() {
        let listed = || {
            vec![
                Ok(Event::Init),
                Ok(Event::InitApply(1)),
                Ok(Event::InitDone),
            ]
        };
        let opened = Mutex::new(0);
        let mut events = listed_anew(move || {
            let mut opened = opened.lock().unwrap();
            *opened += 1;
            let events = match *opened {
                1..=6 => vec![failure()],
                7 => listed().into_iter().chain([failure()]).collect(),
                _ => listed(),
            };
            stream::iter(events).chain(stream::pending())
        });
        let mut whole = Vec::new();
        while whole.len() < 2 {
            if matches!(events.next().await, Some(Ok(Event::InitDone))) {
                whole.push(Instant::now());
            }
        }
        assert!(whole[1] - whole[0] <= FIRST);
    }

    /// Counts the lists until they stop. The list at `full` has an object and then fails; all others are
    /// empty.
    async fn lists_until_it_is_quiet(full: usize) -> u32 {
        let made = Mutex::new(0);
        let mut events = listed_anew(move || {
            let mut made = made.lock().unwrap();
            *made += 1;
            let something = (*made == full).then_some(Ok(Event::InitApply(1)));
            let failed = (*made == full).then(failure);
            let events = [Ok(Event::Init)].into_iter().chain(something);
            let events = events.chain([Ok(Event::InitDone)]).chain(failed);
            stream::iter(events).chain(stream::pending())
        });
        let mut whole = 0;
        let quiet = Duration::from_secs(3600);
        while let Ok(event) = tokio::time::timeout(quiet, events.next()).await {
            whole += u32::from(matches!(event, Some(Ok(Event::InitDone))));
        }
        whole
    }

    #[tokio::test(start_paused = true)]
    async fn relists_confirm_empty_list_after_full_one() {
        assert_eq!(lists_until_it_is_quiet(1).await, 1 + 1 + LOOKS);
        // Without objects before, an empty list is accepted immediately, as for most members at startup.
        assert_eq!(lists_until_it_is_quiet(9).await, 1);
    }

    #[test]
    fn watch_pause_stays_within_quarter_and_eight_seconds() {
        for failures in [0, 1, 5, 60, u32::MAX] {
            assert!(pause(failures, 0.0) >= Duration::from_millis(250));
            assert!(pause(failures, 1.0) <= LONGEST);
        }
        assert_eq!(pause(0, 1.0), FIRST);
        assert_eq!(pause(2, 1.0), FIRST * 4);
    }

    #[test]
    fn success_resets_backoff() {
        let mut waits = WatchBackoff::default();
        for _ in 0..20 {
            waits.next();
        }
        waits.reset();
        assert!(waits.next() <= Some(FIRST));
    }
}
