use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use krypton_types::error_chain::chain;
use kube::client::Body;

use super::*;

static REQUESTS: AtomicUsize = AtomicUsize::new(0);

fn tenant(deleted: Option<i64>) -> Tenant {
    let mut tenant = Tenant::new("acme", TenantSpec::default());
    tenant.metadata.namespace = Some("team".to_owned());
    tenant.metadata.uid = Some("old".to_owned());
    tenant.metadata.deletion_timestamp =
        deleted.map(|second| Time(Timestamp::from_second(second).unwrap()));
    tenant
}

#[test]
fn deletion_must_certainly_precede_crd_deletion() {
    let crd_deleted = Timestamp::from_second(1_000).unwrap();
    let old = BTreeSet::from(["old".to_owned()]);
    let unknown = KnownDeletions::default();
    let confirmed = KnownDeletions {
        confirmed: old.clone(),
        ..KnownDeletions::default()
    };
    let in_progress = KnownDeletions {
        in_progress: old,
        ..confirmed.clone()
    };
    for (deleted_at, expected) in [
        (None, UserDeletion::No),
        (Some(1_601), UserDeletion::No),
        (Some(1_000), UserDeletion::No),
        (Some(999), UserDeletion::Perhaps),
        (Some(401), UserDeletion::Perhaps),
        (Some(400), UserDeletion::Yes),
    ] {
        let if_confirmed = deleted_at.map_or(UserDeletion::No, |_| UserDeletion::Yes);
        let if_in_progress = deleted_at.is_none().then_some(UserDeletion::No);
        for (known, expected) in [
            (&unknown, Some(expected)),
            (&confirmed, Some(if_confirmed)),
            (&in_progress, if_in_progress),
        ] {
            let deletion = user_deletion(&tenant(deleted_at), crd_deleted, known);
            assert_eq!(deletion, expected, "{deleted_at:?} {known:?}");
        }
    }
}

/// Returns the record of a Tenant.
pub(crate) fn record_for(tenant: &Tenant) -> Secret {
    let backup = TenantBackup::new(tenant, UserDeletion::No);
    let name = record_name(&backup.namespace, &backup.name);
    let data = ByteString(encode(&name, &backup).unwrap());
    Secret {
        data: Some([(RECORD_KEY.to_owned(), data)].into()),
        metadata: ObjectMeta {
            name: Some(name),
            ..ObjectMeta::default()
        },
        ..Secret::default()
    }
}

#[test]
fn restored_tenant_keeps_spec_and_previous_uid() {
    let record = BackupRecord::new(record_for(&tenant(Some(100))));
    assert_eq!(record.workspace().as_deref(), Some("acme"));
    assert_eq!(record.key().to_string(), "team/acme");
    let restored = record.backup.unwrap().into_tenant();
    assert_eq!(restored.namespace().as_deref(), Some("team"));
    assert_eq!(restored.annotations()[PREVIOUS_UID_ANNOTATION], "old");
    assert_eq!(restored.metadata.deletion_timestamp, None);
    assert_eq!(restored.metadata.finalizers, None);
}

#[test]
fn tenant_restored_again_keeps_all_previous_uids() {
    let mut restored = tenant(None);
    let earlier = (
        PREVIOUS_UID_ANNOTATION.to_owned(),
        "older,oldest".to_owned(),
    );
    restored.annotations_mut().extend([earlier]);
    let again = TenantBackup::new(&restored, UserDeletion::No).into_tenant();
    assert_eq!(
        again.annotations()[PREVIOUS_UID_ANNOTATION],
        "old,older,oldest"
    );
}

#[test]
fn placed_tenant_is_restored_as_placed() {
    let mut placed = tenant(Some(100));
    placed.metadata.finalizers = Some(vec![names::PLACED_FINALIZER.to_owned()]);
    let placed_on = (names::PLACED_ON_ANNOTATION.to_owned(), "edge-1".to_owned());
    placed.annotations_mut().extend([placed_on]);
    let restored = TenantBackup::new(&placed, UserDeletion::No).into_tenant();
    assert_eq!(
        krypton_types::placed_tenant::placed_on(&restored),
        Some("edge-1")
    );
    assert_eq!(restored.finalizers(), [names::PLACED_FINALIZER]);
    assert_eq!(restored.annotations()[PREVIOUS_UID_ANNOTATION], "old");
}

#[test]
fn tenant_is_restored_with_only_own_finalizer() {
    let mut tenant = tenant(Some(100));
    let finalizers = ["example.org/hold", names::TENANT_FINALIZER];
    tenant.metadata.finalizers = Some(finalizers.map(str::to_owned).to_vec());
    let previous = TenantBackup::new(&tenant, UserDeletion::No);
    // Krypton's finalizer is already removed, but another controller's finalizer remains.
    tenant.metadata.finalizers = Some(vec![finalizers[0].to_owned()]);
    let restored = TenantBackup::new(&tenant, UserDeletion::No)
        .merge_previous(Some(previous))
        .into_tenant();
    assert_eq!(restored.finalizers(), [names::TENANT_FINALIZER]);
}

#[test]
fn confirmed_deletion_outlives_process_for_same_uid() {
    let backup_with = |uid: &str, deleted| TenantBackup {
        uid: uid.to_owned(),
        ..TenantBackup::new(&tenant(Some(99)), deleted)
    };
    for (uid, expected) in [
        ("old", UserDeletion::Yes),
        ("another", UserDeletion::Perhaps),
    ] {
        let merged = backup_with(uid, UserDeletion::Perhaps)
            .merge_previous(Some(backup_with("old", UserDeletion::Yes)));
        assert_eq!(merged, backup_with(uid, expected));
    }
}

#[test]
fn record_of_older_version_is_readable() {
    let mut old = serde_json::to_value(TenantBackup::new(&tenant(None), UserDeletion::No)).unwrap();
    let fields = old.as_object_mut().unwrap();
    fields.retain(|name, _| !["deleted", "finalizer"].contains(&name.as_str()));
    let decoded: TenantBackup = serde_json::from_value(old).unwrap();
    assert_eq!(
        (decoded.deleted, decoded.finalizer),
        (UserDeletion::No, false)
    );
}

#[test]
fn rubbish_in_a_record_is_an_error() {
    let mut secret = record_for(&tenant(None));
    secret.metadata.name = Some("record".to_owned());
    let data = secret.data.get_or_insert_default();
    data.insert(RECORD_KEY.to_owned(), ByteString(b"rubbish".to_vec()));
    let record = BackupRecord::new(secret);
    assert_eq!(record.key().to_string(), "krypton-system/record");
    assert!(matches!(record.backup, Err(BackupError::Unreadable(..))));
}

#[test]
fn each_tenant_has_its_own_record() {
    let names = [("a", "b-c"), ("a-b", "c"), ("a", "b")];
    let names: BTreeSet<_> = names.map(|(ns, name)| record_name(ns, name)).into();
    assert_eq!(names.len(), 3);
    assert!(names.iter().all(|name| name.len() <= 63), "{names:?}");
}

#[tokio::test]
async fn endless_pages_of_tenants_are_an_error() {
    let service = tower::service_fn(|_: http::Request<Body>| async {
        // Many more pages than the limit, but finite, so the test ends even without the limit.
        let next = if REQUESTS.fetch_add(1, Ordering::Relaxed) % 20_000 == 19_999 {
            ""
        } else {
            "more"
        };
        let page = serde_json::json!({"metadata": {"continue": next}, "items": []});
        Ok::<_, Infallible>(http::Response::new(Body::from(
            page.to_string().into_bytes(),
        )))
    });
    let client = Client::new(service, "default");
    let crd_deleted = Timestamp::from_second(100).unwrap();
    let backed_up = back_up_and_release(&client, crd_deleted, &KnownDeletions::default()).await;
    let errors = [backed_up.map(drop), list_records(&client).await.map(drop)];
    for error in errors.map(Result::unwrap_err) {
        let error = chain(&error);
        assert!(error.contains("more than 4000 pages"), "{error}");
    }
}
