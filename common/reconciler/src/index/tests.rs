use krypton_helm::releases;
use krypton_helm::releases::labels::{
    FINGERPRINT_LABEL, OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, RUN_LABEL,
};
use kube::core::PartialObjectMetaExt as _;

use super::*;

fn meta(name: &str) -> ObjectMeta {
    ObjectMeta {
        namespace: Some("acme".to_owned()),
        name: Some(name.to_owned()),
        uid: Some("11111111-2222-3333-4444-555555555555".to_owned()),
        resource_version: Some("123456789".to_owned()),
        ..ObjectMeta::default()
    }
}

fn tenant(name: &str, label: usize) -> Tenant {
    let mut tenant = Tenant::new(name, krypton_crds::tenant::TenantSpec::default());
    tenant.metadata = meta(name);
    tenant.metadata.labels = Some([("label".to_owned(), "x".repeat(label))].into());
    tenant
}

fn namespace(name: &str) -> PartialObjectMeta<Namespace> {
    meta(name).into_response_partial()
}

fn secret(number: usize) -> ObjectMeta {
    let name = format!("tenant-acme-{number:06}");
    let labels = [
        ("name", &*name),
        ("version", "1"),
        ("status", "deployed"),
        (FINGERPRINT_LABEL, &"f".repeat(63)),
        (OWNER_UID_LABEL, "11111111-2222-3333-4444-555555555555"),
        (OWNER_NAMESPACE_LABEL, "tenants-of-acme"),
        (RUN_LABEL, "upgrade-0123456789abcdef"),
    ];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    ObjectMeta {
        labels: Some(labels.into()),
        ..meta(&releases::secret_name(&name, 1))
    }
}

#[test]
fn release_list_of_restored_etcd_wins() {
    let secret = |version: u64, status: &str| {
        let mut secret = secret(1);
        secret.resource_version = Some(version.to_string());
        let labels = secret.labels.as_mut().unwrap();
        labels.insert("status".to_owned(), status.to_owned());
        secret
    };
    let key = Revision::from_metadata(&secret(1, "failed")).unwrap().0;
    // The versions of the watched Secret, of the list and of the Secret that was known before the list.
    let status_after_list = |watched, list, known_before| {
        let mut index = Index::new("one", None);
        let applied = secret(watched, "deployed").into_response_partial();
        index.release_event(Event::Apply(applied));
        let listed = vec![secret(list, "failed")];
        index.release_listed(&key, listed, (list, known_before));
        index.release_revisions(&key)[0].status.as_str().to_owned()
    };
    assert_eq!(status_after_list(8, 9, 8), "failed");
    assert_eq!(
        status_after_list(9, 6, 9),
        "failed",
        "the list is older than the known Secret"
    );
    assert_eq!(
        status_after_list(9, 6, 5),
        "deployed",
        "the watch showed it during the request"
    );
}

#[test]
fn honest_cluster_is_within_the_bounds() {
    let mut index = Index::new("one", None);
    for number in 0..100_000 {
        index.release_event(Event::Apply(secret(number).into_response_partial()));
    }
    for number in 0..500 {
        index.tenant_event(Event::Apply(tenant(&number.to_string(), 10_000)));
    }
    assert_eq!(index.exceeded_bound(500), None);
    assert_eq!(index.revisions.iter().count(), 100_000);
}

#[test]
fn endless_server_exceeds_the_bounds() {
    type AddObject = fn(&mut Index, usize);
    let large = |index: &mut Index, number: usize| {
        index.tenant_event(Event::Apply(tenant(&number.to_string(), 300_000)));
    };
    let listed = |index: &mut Index, number: usize| {
        if number == 0 {
            index.tenant_event(Event::Init);
        }
        index.tenant_event(Event::InitApply(tenant(&number.to_string(), 300_000)));
    };
    let same = |index: &mut Index, number: usize| {
        if number == 0 {
            index.release_event(Event::Init);
        }
        index.release_event(Event::InitApply(meta("none").into_response_partial()));
    };
    let deleted = |index: &mut Index, number: usize| {
        let name = format!("{number}{}", "n".repeat(100_000));
        index.workspace_event(Event::Apply(namespace(&name)));
        index.workspace_event(Event::Delete(namespace(&name)));
    };
    let servers: [(AddObject, usize, ExceededBound); 4] = [
        (large, 300, ExceededBound::Bytes(MAX_STORED_BYTES)),
        (listed, 300, ExceededBound::Bytes(MAX_STORED_BYTES)),
        (same, 250_000, ExceededBound::Objects),
        (deleted, 2000, ExceededBound::Bytes(MAX_STORED_BYTES)),
    ];
    for (number, (add_object, max_objects, expected)) in servers.into_iter().enumerate() {
        let mut index = Index::new("one", None);
        let bound = (0..max_objects).find_map(|number| {
            add_object(&mut index, number);
            index.exceeded_bound(0)
        });
        assert_eq!(bound, Some(expected), "{number}");
        index.clear_watched();
        assert_eq!((index.exceeded_bound(0), index.ready()), (None, false));
        assert!(index.claimants_by_release.is_empty() && index.release_by_owner.is_empty());
    }
    assert_eq!(
        Index::new("one", None).exceeded_bound(250_000),
        Some(ExceededBound::Objects)
    );
}

#[test]
fn bytes_are_given_back() {
    let mut index = Index::new("one", None);
    for size in [10, 1000, 10] {
        index.tenant_event(Event::Apply(tenant("acme", size)));
    }
    index.tenant_event(Event::Init);
    index.tenant_event(Event::InitApply(tenant("other", 10)));
    index.tenant_event(Event::InitDone);
    index.tenant_event(Event::Delete(tenant("other", 10)));
    index.tenant_event(Event::Init);
    assert_eq!(index.tenants.size(), (0, 0));
}

#[test]
fn tenants_keep_only_their_last_managers() {
    let mut stored = tenant("acme", 1);
    let managed = serde_json::json!([
        { "manager": "agent", "time": "2026-01-02T00:00:00Z", "subresource": "status",
          "fieldsV1": { "f:status": {} } },
        { "manager": "flux", "time": "2026-01-01T00:00:00Z",
          "fieldsV1": { "f:spec": { "f:values": {} } } },
    ]);
    stored.metadata.managed_fields = serde_json::from_value(managed).unwrap();
    let mut index = Index::new("one", None);
    index.tenant_event(Event::Apply(stored));
    let (_, stored) = index.tenants.iter().next().unwrap();
    let managers = stored.metadata.managed_fields.iter().flatten();
    let names: Vec<_> = managers.map(|entry| entry.manager.as_deref()).collect();
    assert_eq!(names, [Some("flux")]);
}
