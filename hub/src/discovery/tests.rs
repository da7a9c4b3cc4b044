use std::future::pending;
use std::time::Duration;

use krypton_runtime::watchdog::Watchdog;

use super::*;

/// Longer than any step of a test takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// Behaviour of a fake after it has listed its member.
#[derive(Clone, Copy, Debug)]
enum Habit {
    Good,
    Panics,
    Ends,
    NeverLists,
    /// Publishes this many different states of its member.
    Floods(u32),
}

/// A fake provider of one namespace with one member.
struct Fake {
    namespace: &'static str,
    habit: Habit,
}

fn origin(namespace: &str) -> Origin {
    testkit::origin(namespace, "edge")
}

fn one(namespace: &str, uid: &str) -> BTreeMap<Origin, Arc<Source>> {
    let source = Source {
        uid: uid.to_owned(),
        ..testkit::source(origin(namespace), namespace)
    };
    [(source.origin.clone(), Arc::new(source))].into()
}

impl Provider for Fake {
    fn describe(&self) -> String {
        format!("fake {}", self.namespace)
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.namespace.as_deref() == Some(self.namespace)
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        async move {
            if matches!(self.habit, Habit::NeverLists) {
                return pending().await;
            }
            finds.publish(Some(one(self.namespace, "first")), None);
            match self.habit {
                Habit::Panics => panic!("as it does"),
                Habit::Ends => return,
                Habit::Floods(times) => {
                    for time in 0..times {
                        finds.publish(Some(one(self.namespace, &format!("change {time}"))), None);
                    }
                    finds.publish(Some(one(self.namespace, "last")), None);
                }
                Habit::Good | Habit::NeverLists => {}
            }
            // Lists a source with a rejected credential again.
            loop {
                let doubted = finds.doubted().await;
                let namespace = doubted.namespace.unwrap_or_default();
                finds.publish(Some(one(&namespace, "again")), None);
            }
        }
        .boxed()
    }
}

fn fake(namespace: &'static str, habit: Habit) -> Arc<dyn Provider> {
    Arc::new(Fake { namespace, habit })
}

/// The UID of the member in a namespace, or `None` while it is unknown.
fn uid(sources: &Sources, namespace: &str) -> Option<String> {
    let found = sources
        .iter()
        .find(|found| found.provider.covers(&origin(namespace)))?;
    let sources = found.listing.sources.as_ref()?;
    Some(sources.get(&origin(namespace))?.uid.clone())
}

fn closed(sources: &Sources, namespace: &str) -> bool {
    sources
        .iter()
        .any(|found| found.provider.covers(&origin(namespace)) && found.listing.closed)
}

async fn until(
    sources: &mut watch::Receiver<Sources>,
    holds: impl FnMut(&Sources) -> bool,
) -> Sources {
    let reached = tokio::time::timeout(PATIENCE, sources.wait_for(holds));
    reached.await.expect("in time").expect("it runs").clone()
}

#[tokio::test]
async fn faulty_provider_keeps_sources_and_affects_no_other() {
    let stop = CancellationToken::new();
    let providers = vec![
        fake("panics", Habit::Panics),
        fake("ends", Habit::Ends),
        fake("hangs", Habit::NeverLists),
        fake("floods", Habit::Floods(10_000)),
        fake("good", Habit::Good),
    ];
    let mut sources = start(providers, &Watchdog::default(), &stop);
    let now = until(&mut sources, |sources| {
        closed(sources, "panics")
            && closed(sources, "ends")
            && uid(sources, "floods").as_deref() == Some("last")
            && uid(sources, "good").is_some()
    })
    .await;
    for namespace in ["panics", "ends", "good"] {
        assert_eq!(
            uid(&now, namespace).as_deref(),
            Some("first"),
            "{namespace}"
        );
    }
    assert_eq!(uid(&now, "hangs"), None);
    for namespace in ["hangs", "floods", "good"] {
        assert!(!closed(&now, namespace), "{namespace}");
    }

    // The other providers keep running.
    now.doubt(&origin("good"));
    now.doubt(&origin("panics"));
    until(&mut sources, |sources| {
        uid(sources, "good").as_deref() == Some("again")
    })
    .await;
    assert_eq!(uid(&sources.get(), "panics").as_deref(), Some("first"));
    stop.cancel();
}

/// On one thread nothing reads between two changes: the slot holds the latest, and no queue grows.
#[tokio::test]
async fn flood_keeps_only_the_newest() {
    let stop = CancellationToken::new();
    let mut sources = start(
        vec![fake("floods", Habit::Floods(10_000))],
        &Watchdog::default(),
        &stop,
    );
    let mut seen = 0;
    until(&mut sources, |sources| {
        seen += 1;
        uid(sources, "floods").as_deref() == Some("last")
    })
    .await;
    assert!(seen < 10, "{seen} of 10,000 changes were looked at");
    stop.cancel();
}

#[tokio::test]
async fn trouble_keeps_sources_and_clears_on_next_list() {
    let given = Found::new(fake("a", Habit::Good), Listing::default());
    let (all, sources) = watch::channel(Sources(vec![given]));
    let listing = || sources.get().0.swap_remove(0).listing;
    let finds = Finds {
        all,
        index: 0,
        doubts: Arc::default(),
        departures: Arc::default(),
    };
    finds.publish(None, Some("the watch failed".to_owned()));
    assert_eq!(listing().sources, None);
    finds.publish(Some(one("a", "first")), None);
    assert_eq!(listing().trouble, None);
    finds.publish(None, Some("the watch failed".to_owned()));
    assert!(listing().sources.is_some());
    finds.publish(Some(one("a", "next")), Some("half of it failed".to_owned()));
    assert_eq!(listing().trouble.as_deref(), Some("half of it failed"));
    finds.publish(Some(one("a", "next")), None);
    assert_eq!(listing().trouble, None);
}

#[tokio::test]
async fn hub_shutdown_removes_no_source() {
    let stop = CancellationToken::new();
    let mut sources = start(vec![fake("good", Habit::Good)], &Watchdog::default(), &stop);
    until(&mut sources, |sources| uid(sources, "good").is_some()).await;
    stop.cancel();
    let ended = tokio::time::timeout(PATIENCE, async { while sources.changed().await.is_ok() {} });
    ended.await.expect("in time");
    assert!(uid(&sources.get(), "good").is_some());
}

/// Finds objects by a reference.
struct ByName;

impl Provider for ByName {
    fn describe(&self) -> String {
        "by name".to_owned()
    }

    fn covers(&self, _: &Origin) -> bool {
        true
    }

    fn marks(&self) -> bool {
        false
    }

    fn follow(self: Arc<Self>, _: Finds) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}

/// Counts the departures of one Secret after each step. Each step gives the listings of both providers, by
/// label and by name.
fn departures(steps: &[(Option<&str>, Option<&str>)]) -> Vec<usize> {
    let labelled: Arc<dyn Provider> = fake("a", Habit::Good);
    let providers = [labelled, Arc::new(ByName) as Arc<dyn Provider>];
    let given = |provider| Found::new(provider, Listing::default());
    let mut sources = Sources(providers.map(given).into());
    let mut counts = Vec::new();
    for (by_label, by_name) in steps {
        for (found, uid) in sources.0.iter_mut().zip([by_label, by_name]) {
            let next = uid.map_or_else(BTreeMap::new, |uid| {
                let mut all = one("a", uid);
                if uid.is_empty() {
                    let source = Arc::make_mut(all.get_mut(&origin("a")).unwrap());
                    source.access = Err(Unresolved {
                        reason: krypton_types::conditions::reason::STARTING,
                        message: String::new(),
                    });
                }
                all
            });
            if let Some(before) = &found.listing.sources {
                found.departures.note(before, &next);
            }
            found.listing.sources = Some(Arc::new(next));
        }
        counts.push(sources.take_departed().len());
    }
    counts
}

#[test]
fn source_that_another_provider_lists_has_not_departed() {
    let (here, none, unread) = (Some("u"), None, Some(""));
    // The KryptonDeployment that references the Secret is deleted and recreated.
    let steps = [(here, here), (here, none), (here, here)];
    assert_eq!(departures(&steps), [0, 0, 0]);
    // The Secret is not read yet, as after a restart.
    let steps = [(none, unread), (none, here), (none, unread), (none, here)];
    assert_eq!(departures(&steps), [0, 0, 0, 0]);
    // The label is removed and added again.
    let steps = [(here, here), (none, here), (none, here), (here, here)];
    assert_eq!(departures(&steps), [0, 0, 0, 1]);
    // No provider lists the source, in either order.
    assert_eq!(departures(&[(here, here), (none, none)]), [0, 1]);
    for steps in [(none, here), (here, none)].map(|step| [(here, here), step, (none, none)]) {
        assert_eq!(departures(&steps), [0, 0, 1]);
    }
    // The source is deleted and recreated.
    assert_eq!(departures(&[(here, here), (Some("v"), Some("v"))]), [0, 1]);
}
