use arc_swap::ArcSwap;
use futures::FutureExt;
use krypton_proto::v1::RenewResponse;
use krypton_types::root_digest::RootDigest;

use super::*;
use crate::credentials::store::Enrolled;
use crate::credentials::store::tests::{enrolled_until, store_overtaken_by, store_with};
use crate::fake_hub::{Answers, FakeAuthority, FakeHub, Valid};

fn identity(authority: &FakeAuthority) -> Identity {
    identity_until(authority, Valid::Now)
}

fn identity_until(authority: &FakeAuthority, valid: Valid) -> Identity {
    let key = new_key().unwrap();
    let enrolled = enrolled_until(authority, &key, "edge-1", valid);
    Identity {
        key,
        enrolled: Some(enrolled),
    }
}

/// Starts a hub that signs every renewal request.
async fn renewing(authority: &Arc<FakeAuthority>) -> FakeHub {
    let signing = Arc::clone(authority);
    let answers = Answers {
        renew: Box::new(move |request| {
            let own = signing.sign(&request.certificate_request, "edge-1");
            let roots = signing.roots();
            Ok(RenewResponse {
                certificates: vec![own.into()],
                roots: roots.iter().map(|root| root.to_vec().into()).collect(),
            })
        }),
        ..Answers::default()
    };
    let own = authority.hub(Valid::Now);
    FakeHub::start_as(authority, own, answers, "127.0.0.1:0").await
}

#[tokio::test]
async fn renewal_stores_and_uses_new_key() {
    let authority = Arc::new(FakeAuthority::new());
    let hub = renewing(&authority).await;
    let before = identity(&authority);
    let store = store_with(&before).await;
    let ours = store.read().await.unwrap().unwrap();
    let config = before.enrolled.as_ref().unwrap().client_config(&before.key);
    let tls = Arc::new(ArcSwap::from_pointee(config.unwrap()));
    let dialer = Dialer::new(hub.addresses(), tls);
    let connection = dialer.connect().await.unwrap();
    let (_link, mut link) = watch::channel(Link::Up(connection));

    let renewed = renew(&store, &ours, &mut link).await.unwrap();
    let key = renewed.identity.key.serialize_der();
    assert_ne!(key, before.key.serialize_der());
    let stored = store.read().await.unwrap().unwrap();
    assert_eq!(stored.identity.key.serialize_der(), key);
    assert_eq!(stored.identity.enrolled, renewed.identity.enrolled);
    let config = renewed.identity.enrolled.unwrap();
    dialer.renew(config.client_config(&renewed.identity.key).unwrap());
    assert!(dialer.connect().await.is_ok());
}

#[tokio::test]
async fn certificate_renewed_by_other_replica_is_adopted() {
    let authority = FakeAuthority::new();
    let theirs = identity(&authority);
    let store = store_with(&theirs).await;
    let mut ours = store.read().await.unwrap().unwrap();
    let mut older = identity(&authority);
    if let Some(enrolled) = &mut older.enrolled {
        enrolled.not_after = enrolled.not_before;
    }
    ours.identity = older;
    let (_link, mut link) = watch::channel(Link::default());
    let adopted = renew(&store, &ours, &mut link).await.unwrap();
    assert_eq!(adopted.identity.enrolled, theirs.enrolled);
}

#[tokio::test]
async fn overtaken_renewal_succeeds_only_with_newer_certificate() {
    let authority = Arc::new(FakeAuthority::new());
    let hub = renewing(&authority).await;
    let dialer = authority.dialer(hub.addresses(), Valid::Now);
    let connection = dialer.connect().await.unwrap();
    let (_link, mut link) = watch::channel(Link::Up(connection));
    let before = identity_until(&authority, Valid::Past);

    // Another replica has stored new roots with the old certificate.
    let mut with_roots = before.clone();
    let enrolled = with_roots.enrolled.as_mut().unwrap();
    enrolled.roots.extend(FakeAuthority::new().roots());
    let store = store_overtaken_by(&before, &with_roots).await;
    let ours = store.read().await.unwrap().unwrap();
    let error = renew(&store, &ours, &mut link).await.unwrap_err();
    assert!(matches!(error, EnrollError::Overtaken), "{error:?}");
    let stored = store.read().await.unwrap().unwrap();
    assert_eq!(stored.identity.enrolled, with_roots.enrolled);
    // The next attempt has no conflict.
    let renewed = renew(&store, &ours, &mut link).await.unwrap();
    assert!(expires(&renewed) > expires(&ours));
    let stored = store.read().await.unwrap().unwrap();
    assert_eq!(stored.identity.enrolled, renewed.identity.enrolled);

    // Another replica has renewed.
    let theirs = identity(&authority);
    let store = store_overtaken_by(&before, &theirs).await;
    let ours = store.read().await.unwrap().unwrap();
    let renewed = renew(&store, &ours, &mut link).await.unwrap();
    assert_eq!(renewed.identity.enrolled, theirs.enrolled);
}

/// A keeper of `identity`, with the other ends of its channels.
struct Keeping {
    store: Store,
    dialer: Arc<Dialer>,
    link: watch::Sender<Link>,
    expiry: watch::Receiver<Timestamp>,
    _stop: tokio_util::sync::DropGuard,
}

async fn keeper(identity: &Identity, addresses: Vec<String>) -> Keeping {
    let store = store_with(identity).await;
    let kept = store.read().await.unwrap().unwrap();
    keeper_of(identity, kept, store, addresses)
}

fn keeper_of(identity: &Identity, kept: Kept, store: Store, addresses: Vec<String>) -> Keeping {
    let enrolled = identity.enrolled.as_ref().unwrap();
    let config = enrolled.client_config(&identity.key).unwrap();
    let dialer = Dialer::new(addresses, Arc::new(ArcSwap::from_pointee(config)));
    let dialer = Arc::new(dialer);
    let (link, link_rx) = watch::channel(Link::default());
    let (expiry_tx, expiry) = watch::channel(enrolled.not_after);
    let stop = CancellationToken::new();
    tokio::spawn(keep_renewed(
        store.clone(),
        kept,
        Arc::clone(&dialer),
        link_rx,
        expiry_tx,
        stop.clone(),
    ));
    Keeping {
        store,
        dialer,
        link,
        expiry,
        _stop: stop.drop_guard(),
    }
}

impl Keeping {
    async fn stored(&self) -> Enrolled {
        let stored = self.store.read().await.unwrap().unwrap();
        stored.identity.enrolled.unwrap()
    }

    /// Announces `roots` as the hub does, and waits until the agent confirms them.
    async fn is_told(&self, roots: &[CertificateDer<'static>], renew: Option<Duration>) {
        let wanted = RootDigest::of_all(roots);
        let mut kept = self.dialer.trust().kept();
        kept.mark_unchanged();
        self.dialer.trust().tell(Told {
            roots: roots.to_vec(),
            renew_within: renew,
        });
        kept.changed().await.unwrap();
        assert_eq!(kept.get(), Some(wanted));
    }
}

#[tokio::test]
async fn announced_roots_are_stored_without_renewing_certificate() {
    let (old, new) = (FakeAuthority::new(), FakeAuthority::new());
    let before = identity(&old);
    let next = new.hub(Valid::Now);
    let hub = FakeHub::start_as(&old, next, Answers::default(), "127.0.0.1:0").await;
    let kept = keeper(&before, hub.addresses()).await;
    let other = kept.dialer.connect().await.unwrap_err();
    assert!(chain(&other).contains("another CA"), "{other:?}");

    let both = [old.roots(), new.roots()].concat();
    kept.is_told(&both, None).await;
    let enrolled = before.enrolled.unwrap();
    let expected = Enrolled {
        roots: both,
        ..enrolled
    };
    assert_eq!(kept.stored().await, expected);
    kept.dialer.connect().await.unwrap();
    // New roots alone must not replace the current stream.
    assert!(kept.dialer.renewed().now_or_never().is_none());

    // The old root is removed.
    kept.is_told(&new.roots(), None).await;
    assert_eq!(kept.stored().await.roots, new.roots());
}

#[tokio::test]
async fn foreign_roots_change_nothing_on_member() {
    let old = FakeAuthority::new();
    let before = identity(&old);
    let kept = keeper(&before, vec!["127.0.0.1:1".to_owned()]).await;
    kept.dialer.trust().tell(Told {
        roots: FakeAuthority::new().roots(),
        renew_within: None,
    });
    // The agent processed the later announcement, so it rejected the earlier one.
    kept.is_told(&old.roots(), None).await;
    assert_eq!(Some(kept.stored().await), before.enrolled);
}

#[tokio::test]
async fn certificate_is_renewed_early_on_hub_request() {
    let authority = Arc::new(FakeAuthority::new());
    let hub = renewing(&authority).await;
    let before = identity(&authority);
    let kept = keeper(&before, hub.addresses()).await;
    // The hub disconnects before the renewal is due. The agent renews when it is connected again.
    kept.is_told(&authority.roots(), Some(Duration::ZERO)).await;
    let connection = kept.dialer.connect().await.unwrap();
    kept.link.send_replace(Link::Up(connection));
    kept.dialer.renewed().await;
    assert_ne!(Some(kept.stored().await), before.enrolled);
    assert_eq!(kept.expiry.get(), kept.stored().await.not_after);
}

#[tokio::test]
async fn renewal_by_other_replica_is_found_without_hub() {
    let authority = FakeAuthority::new();
    let (before, theirs) = (identity(&authority), identity(&authority));
    let store = store_with(&before).await;
    let ours = store.read().await.unwrap().unwrap();
    store.keep(ours.clone(), theirs).await.unwrap();
    let kept = keeper_of(&before, ours, store, vec!["127.0.0.1:1".to_owned()]);
    kept.dialer.renewed().await;
    assert_ne!(Some(kept.stored().await), before.enrolled);
}

#[test]
fn next_chore_follows_from_due_times() {
    let at = |second| BootTime(Duration::from_secs(second));
    let (now, never, long) = (at(1000), Times::default(), LOOK_EVERY * 2);
    let seconds = Duration::from_secs;
    let rest = |second| Chore::Rest(seconds(second));
    let roots = |second| Times {
        roots: Some(at(second)),
        ..never
    };
    let asked = |second| Times {
        asked: Some(at(second)),
        ..never
    };
    let failed = |second| Times {
        renewal: at(second),
        ..asked(second - 10)
    };
    let looked = Times {
        look: at(1030),
        ..never
    };
    for (times, left, up, expected) in [
        (never, long, true, Chore::Rest(LOOK_EVERY)),
        (never, seconds(5), true, rest(5)),
        (never, Duration::ZERO, true, Chore::Renew),
        // Renewal needs a session. The read is not repeated immediately.
        (never, Duration::ZERO, false, Chore::ReadAgain),
        (looked, Duration::ZERO, false, rest(30)),
        (failed(1007), Duration::ZERO, true, rest(7)),
        (failed(1000), long, true, Chore::Renew),
        (asked(1020), long, true, rest(20)),
        (asked(999), long, true, Chore::Renew),
        // Roots come first, because they verify the renewed certificate.
        (roots(1000), Duration::ZERO, true, Chore::KeepRoots),
        (roots(1003), long, true, rest(3)),
        (roots(1003), Duration::ZERO, true, Chore::Renew),
    ] {
        assert_eq!(
            times.chore(left, up, now),
            expected,
            "{times:?} {left:?} {up}"
        );
    }
}

#[test]
fn renewal_is_due_at_70_to_80_percent() {
    let at = |second| Timestamp::from_second(second).unwrap();
    assert_eq!(renewal_time(at(1000), at(2000), 0.0), at(1700));
    assert_eq!(renewal_time(at(1000), at(2000), 1.0), at(1800));
    assert_eq!(renewal_time(at(1000), at(1000), 0.5), at(1000));
}
