//! A watch that lists again after each failure, after an empty list, and in each leader term.

pub mod store;

use std::fmt;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{FutureExt as _, Stream, StreamExt as _};
use kube::Resource;
use kube::api::Api;
use kube::runtime::watcher::{self, Config, Event, watcher};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};

use crate::chance;
use crate::clock::BootTime;
use crate::retry::Backoff;

/// Pause after a failure. kube's default grows to 30 s and resets only after two minutes. After an outage, the first
/// response is often an expired `resourceVersion`, so recovery would take that long again.
const BACKOFF: Backoff = Backoff {
    first: Duration::from_millis(500),
    max: Duration::from_secs(8),
};
/// Pause before an empty list is repeated. It doubles each time.
const EMPTY_LIST_PAUSE: Duration = Duration::from_secs(5);
/// Number of empty lists until the result is accepted, after ten minutes.
const EMPTY_LISTS_MAX: u32 = 7;
/// Time without an event after which the list of a restarted watch is requested again. It doubles each time up to
/// [`SILENCE_MAX`], which also applies to other lists. Without it, a lost connection would end a watch forever.
/// Together with the duration of the hub's Lease, it allows a second request within ten seconds of a takeover.
const SILENCE: Duration = Duration::from_secs(2);
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Further time after a failure. It exceeds the back-off.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

type Events<K, E> = BoxStream<'static, Result<Event<K>, E>>;

/// Watches objects. Opens another watch, with a new list, after each failure.
///
/// Unlike this type, kube's own watcher resumes at the last `resourceVersion`. That is wrong if etcd was
/// restored from a backup: the version is then in the future. The watch receives no events until the server
/// reaches that version, and the changes before it are lost. The watcher also never leaves a
/// `resourceVersion` that the server rejects as too old before the stream starts. And its back-off does not
/// grow, because it counts the start of a list, before the request, as a success.
///
/// If the process may list but not watch, or no watch gets through, this type lists at least every eight
/// seconds. A watch counts as a success after its first event, or after it was open for that long.
///
/// After an empty list, this type lists again later, also if it is the first list. The server may not have known
/// all objects yet, and a watch never reports unchanged ones. The empty list counts as complete until then. A
/// kind without objects costs seven more lists in ten minutes after each start or failure.
pub struct Watch<K, E = watcher::Error> {
    open: Box<dyn Fn() -> Events<K, E> + Send>,
    /// `None` until the next watch opens.
    events: Option<Events<K, E>>,
    /// When the next watch opens. `None` means immediately.
    opens_at: Option<Instant>,
    /// Consecutive failures, for the back-off.
    failures: u32,
    /// Time since which the list is complete.
    complete_since: Option<Instant>,
    /// Number of consecutive complete lists without a successful watch. A complete list resets the earlier
    /// failures, because the first response after an outage is often another failure.
    lists_without_watch: u32,
    empty_lists: EmptyLists,
    /// Start of the leader term for which the watch last restarted.
    term: Option<BootTime>,
    /// Set while the list is outstanding: the deadline for its next event, and the timeout for each event.
    list_deadline: Option<(Instant, Duration)>,
}

impl<K, E> fmt::Debug for Watch<K, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}

impl<K> Watch<K>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    /// Watches the objects of `api` that `config` selects.
    pub fn objects(api: Api<K>, config: Config) -> Self {
        Self::new(move || watcher(api.clone(), config.clone()))
    }
}

impl<K: Send + 'static, E: Send + 'static> Watch<K, E> {
    /// Watches with the streams that `open` returns. A stream must start with a list.
    pub fn new<W>(open: impl Fn() -> W + Send + 'static) -> Self
    where
        W: Stream<Item = Result<Event<K>, E>> + Send + 'static,
    {
        Self {
            open: Box::new(move || open().boxed()),
            events: None,
            opens_at: None,
            failures: 0,
            complete_since: None,
            lists_without_watch: 0,
            empty_lists: EmptyLists::default(),
            term: None,
            list_deadline: None,
        }
    }

    /// Drops the current watch and lists again. A list that hangs is requested again.
    pub fn restart(&mut self) {
        self.restart_within(SILENCE);
    }

    fn restart_within(&mut self, silence: Duration) {
        (self.events, self.opens_at, self.complete_since) = (None, None, None);
        (self.failures, self.lists_without_watch) = (0, 0);
        self.empty_lists = EmptyLists::default();
        self.list_deadline = Some((Instant::now() + silence, silence));
    }

    /// Restarts the watch if `term` is the start of a new leader term, and returns whether it did. The data of a
    /// standby may be stale, because it was disconnected or its watch hung without an error. The caller must
    /// then ignore its data until the list is complete. An unconfirmed leader keeps its term, and a standby has
    /// none.
    pub fn restart_for_term(&mut self, term: Option<BootTime>) -> bool {
        let is_new = term.is_some() && term != self.term;
        if is_new {
            self.term = term;
            self.restart();
        }
        is_new
    }

    /// Returns the start of the leader term for which the watch last restarted.
    pub fn term(&self) -> Option<BootTime> {
        self.term
    }

    /// Returns the next event or failure. Safe to drop.
    pub async fn next(&mut self) -> Result<Event<K>, E> {
        loop {
            let Some(events) = &mut self.events else {
                if let Some(opens_at) = self.opens_at {
                    sleep_until(opens_at).await;
                }
                self.events = Some((self.open)());
                self.list_deadline
                    .get_or_insert((Instant::now() + SILENCE_MAX, SILENCE_MAX));
                continue;
            };
            tokio::select! {
                biased;
                next = events.next() => match next {
                    Some(Ok(event)) => {
                        self.record_success(&event);
                        return Ok(event);
                    }
                    Some(Err(error)) => {
                        self.record_failure();
                        return Err(error);
                    }
                    None => self.record_failure(),
                },
                () = sleep_until_if_set(self.empty_lists.relist_at) => {
                    // A stream may wait before it lists.
                    self.empty_lists.relist_at = None;
                    (self.events, self.opens_at) = (None, None);
                }
                () = sleep_until_if_set(self.list_deadline.map(|(due, _)| due)) => {
                    let silence = self.list_deadline.map_or(SILENCE, |(_, silence)| silence);
                    tracing::warn!(silent_s = silence.as_secs(), "no response to a list; retrying");
                    self.restart_within((silence * 2).min(SILENCE_MAX));
                }
            }
        }
    }

    /// Returns an event or failure that has already arrived, to handle several of them together.
    pub fn try_next(&mut self) -> Option<Result<Event<K>, E>> {
        self.next().now_or_never()
    }

    pub fn into_stream(self) -> BoxStream<'static, Result<Event<K>, E>> {
        stream::unfold(self, |mut watch| async move {
            let next = watch.next().await;
            Some((next, watch))
        })
        .boxed()
    }

    fn record_success(&mut self, event: &Event<K>) {
        let waits = !matches!(event, Event::InitDone);
        let list_deadline = self.list_deadline.filter(|_| waits);
        self.list_deadline = list_deadline.map(|(_, silence)| (Instant::now() + silence, silence));
        match event {
            Event::Init | Event::InitApply(_) => {}
            Event::InitDone => self.complete_since = Some(Instant::now()),
            Event::Apply(_) | Event::Delete(_) => {
                (self.failures, self.lists_without_watch) = (0, 0);
            }
        }
        self.empty_lists.record(event);
    }

    fn record_failure(&mut self) {
        if let Some(since) = self.complete_since.take() {
            if since.elapsed() >= BACKOFF.max {
                self.lists_without_watch = 0;
            }
            self.failures = self.lists_without_watch;
            self.lists_without_watch += 1;
        }
        self.failures = self.failures.saturating_add(1);
        self.events = None;
        self.opens_at = Some(Instant::now() + BACKOFF.pause(self.failures, chance::random()));
        if let Some((due, silence)) = &mut self.list_deadline {
            *due = Instant::now() + AFTER_FAILURE + *silence;
        }
    }
}

/// Returns the HTTP status with which the API server refused a list.
pub fn list_refusal(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

async fn sleep_until_if_set(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Decides whether an empty list needs another check.
#[derive(Debug, Default)]
struct EmptyLists {
    has_objects: bool,
    /// Number of empty lists since the last one with objects, or since one was accepted.
    empty_in_a_row: u32,
    relist_at: Option<Instant>,
}

impl EmptyLists {
    fn record<K>(&mut self, event: &Event<K>) {
        match event {
            Event::Init => (self.has_objects, self.relist_at) = (false, None),
            Event::InitApply(_) => self.has_objects = true,
            Event::InitDone if self.has_objects || self.empty_in_a_row == EMPTY_LISTS_MAX => {
                self.empty_in_a_row = 0;
            }
            Event::InitDone => {
                let pause = EMPTY_LIST_PAUSE * (1 << self.empty_in_a_row);
                self.empty_in_a_row += 1;
                self.relist_at = Some(Instant::now() + pause);
            }
            Event::Apply(_) | Event::Delete(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;

    use super::*;

    fn failure() -> watcher::Result<Event<u8>> {
        Err(watcher::Error::NoResourceVersion)
    }

    #[tokio::test(start_paused = true)]
    async fn failed_list_is_relisted_with_backoff_until_complete() {
        let failing = || vec![Ok(Event::Init), Ok(Event::InitApply(1)), failure()];
        // In reverse order.
        let complete_list = || vec![Ok(Event::Init), Ok(Event::InitDone), Ok(Event::Apply(2))];
        let watches = Mutex::new(vec![
            complete_list(),
            complete_list().into_iter().chain([failure()]).collect(),
            failing(),
            failing(),
            failing(),
            failing(),
        ]);
        let mut events = Watch::new(move || {
            let events = watches.lock().pop().unwrap_or_default();
            stream::iter(events).chain(stream::pending())
        });
        let mut pauses = Vec::new();
        let mut previous = tokio::time::Instant::now();
        let mut sequence = String::new();
        while pauses.len() < 6 {
            let event = events.next().await;
            if matches!(event, Ok(Event::Init)) {
                pauses.push(previous.elapsed());
            }
            previous = tokio::time::Instant::now();
            sequence.push(match event {
                Ok(Event::Init) => 'i',
                Ok(Event::InitApply(_)) => 'o',
                Ok(Event::InitDone) => 'd',
                Ok(_) => 'a',
                Err(_) => '!',
            });
        }
        assert_eq!(sequence, "io!io!io!io!ida!i");
        assert_eq!(pauses[0], Duration::ZERO);
        for (failures, pause) in pauses[1..5].iter().enumerate() {
            let full = BACKOFF.first * (1 << failures);
            assert!(*pause >= full / 2 && *pause <= full, "{pauses:?}");
        }
        assert!(
            pauses[5] <= BACKOFF.first,
            "from the start again: {pauses:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn relist_backs_off_when_watch_always_fails() {
        let mut events = Watch::new(|| {
            let events = [
                Ok(Event::Init),
                Ok(Event::InitApply(1)),
                Ok(Event::InitDone),
            ];
            stream::iter(events.into_iter().chain([failure()]))
        });
        let (mut lists, started) = (0, Instant::now());
        while started.elapsed() < Duration::from_secs(600) {
            lists += u32::from(matches!(events.next().await, Ok(Event::InitDone)));
        }
        assert!((75..170).contains(&lists), "{lists} in ten minutes");
    }

    #[tokio::test(start_paused = true)]
    async fn complete_list_after_outage_resets_watch_backoff() {
        let list = || {
            vec![
                Ok(Event::Init),
                Ok(Event::InitApply(1)),
                Ok(Event::InitDone),
            ]
        };
        let opened = Mutex::new(0);
        let mut events = Watch::new(move || {
            let mut opened = opened.lock();
            *opened += 1;
            let events = match *opened {
                1..=6 => vec![failure()],
                7 => list().into_iter().chain([failure()]).collect(),
                _ => list(),
            };
            stream::iter(events).chain(stream::pending())
        });
        let mut listed_at = Vec::new();
        while listed_at.len() < 2 {
            if matches!(events.next().await, Ok(Event::InitDone)) {
                listed_at.push(Instant::now());
            }
        }
        assert!(listed_at[1] - listed_at[0] <= BACKOFF.first);
    }

    /// Counts the lists until they stop. The list at `full_list` has an object and then fails; all others are
    /// empty. Each is slow, and none is interrupted.
    async fn count_lists_until_quiet(full_list: usize) -> usize {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&opened);
        let mut events = Watch::new(move || {
            let is_full = count.fetch_add(1, Ordering::Relaxed) + 1 == full_list;
            let object = is_full.then_some(Ok(Event::InitApply(1)));
            let failed = is_full.then(failure);
            let events = object.into_iter().chain([Ok(Event::InitDone)]);
            let slow = stream::once(async {
                tokio::time::sleep(BACKOFF.first).await;
                Ok(Event::Init)
            });
            slow.chain(stream::iter(events.chain(failed)))
                .chain(stream::pending())
        });
        let mut lists = 0;
        let quiet = Duration::from_secs(3600);
        while let Ok(event) = tokio::time::timeout(quiet, events.next()).await {
            lists += usize::from(matches!(event, Ok(Event::InitDone)));
        }
        assert_eq!(opened.load(Ordering::Relaxed), lists);
        lists
    }

    #[tokio::test(start_paused = true)]
    async fn empty_list_is_repeated_until_accepted() {
        let repeats = EMPTY_LISTS_MAX as usize;
        assert_eq!(count_lists_until_quiet(99).await, 1 + repeats);
        // An object starts the count again.
        for full_list in [1, 3] {
            let lists = count_lists_until_quiet(full_list).await;
            assert_eq!(lists, full_list + 1 + repeats);
        }
    }

    /// Callers wait for the first complete list, so a kind without objects must not delay them.
    #[tokio::test(start_paused = true)]
    async fn empty_first_list_completes_before_its_repetition() {
        let opened = AtomicUsize::new(0);
        let mut watch = Watch::new(move || {
            let is_first = opened.fetch_add(1, Ordering::Relaxed) == 0;
            let object = (!is_first).then_some(Ok(Event::InitApply(1)));
            let list: Vec<watcher::Result<Event<u8>>> = [Ok(Event::Init)]
                .into_iter()
                .chain(object)
                .chain([Ok(Event::InitDone)])
                .collect();
            stream::iter(list).chain(stream::pending())
        });
        let started = Instant::now();
        while !matches!(watch.next().await, Ok(Event::InitDone)) {}
        assert_eq!(started.elapsed(), Duration::ZERO);
        assert!(watch.try_next().is_none());
        let repetition = async { while !matches!(watch.next().await, Ok(Event::InitApply(1))) {} };
        let repeated = tokio::time::timeout(EMPTY_LIST_PAUSE * 2, repetition).await;
        assert!(repeated.is_ok(), "the object stays hidden");
    }

    /// The first `hanging` watches never complete their list. Each later one lists nothing and stays open.
    fn counted_watch(hanging: usize) -> (Arc<AtomicUsize>, Watch<()>) {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&opened);
        let watch = Watch::new(move || {
            let number = count.fetch_add(1, Ordering::Relaxed);
            let list = [Ok(Event::Init), Ok(Event::InitDone)];
            let list_events = list.into_iter().take(if number < hanging { 1 } else { 2 });
            stream::iter(list_events).chain(stream::pending())
        });
        (opened, watch)
    }

    async fn wait_for_list(watch: &mut Watch<()>) {
        while !matches!(watch.next().await, Ok(Event::InitDone)) {}
    }

    #[tokio::test]
    async fn watch_restarts_only_with_new_term() {
        let (opened, mut watch) = counted_watch(0);
        let term = |seconds| Some(BootTime(Duration::from_secs(seconds)));
        wait_for_list(&mut watch).await;
        let mut lists = 1;
        for (term, is_new) in [
            (None, false),
            (term(1), true),
            // The leader was unconfirmed and kept its Lease.
            (term(1), false),
            (None, false),
            (term(1), false),
            (term(2), true),
        ] {
            assert_eq!(watch.restart_for_term(term), is_new, "{term:?}");
            if is_new {
                wait_for_list(&mut watch).await;
                lists += 1;
            }
            assert!(watch.try_next().is_none());
            assert_eq!(opened.load(Ordering::Relaxed), lists);
        }
        assert_eq!(watch.term(), term(2));
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_list_is_retried_but_not_quiet_watch() {
        let (opened, mut watch) = counted_watch(2);
        let started = Instant::now();
        watch.restart_for_term(Some(BootTime(Duration::from_secs(1))));
        wait_for_list(&mut watch).await;
        assert_eq!(opened.load(Ordering::Relaxed), 3);
        assert!(started.elapsed() >= SILENCE);
        assert!(watch.list_deadline.is_none(), "a watch may be quiet");
    }

    #[tokio::test(start_paused = true)]
    async fn first_list_that_hangs_is_retried() {
        let (opened, mut watch) = counted_watch(1);
        wait_for_list(&mut watch).await;
        assert_eq!(opened.load(Ordering::Relaxed), 2);
    }

    /// A caller that waits for other things too drops `next` again and again.
    #[tokio::test(start_paused = true)]
    async fn dropped_wait_does_not_prolong_pause() {
        let mut watch = Watch::new(|| stream::iter([failure()]));
        assert!(watch.next().await.is_err());
        let failed = Instant::now();
        while tokio::time::timeout(BACKOFF.first / 10, watch.next())
            .await
            .is_err()
        {}
        assert!(failed.elapsed() <= BACKOFF.first + BACKOFF.first / 10);
    }
}
