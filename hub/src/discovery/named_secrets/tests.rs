use k8s_openapi::ByteString;

use super::*;

fn provider(references: SecretReferences) -> NamedSecrets {
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    NamedSecrets {
        client: Client::try_from(nowhere).unwrap(),
        references: watch::channel(references).1,
        states: watch::channel(Arc::default()).0,
        label: "there".to_owned(),
        key: "kubeconfig".to_owned(),
        prefix: "s-".to_owned(),
        policy: Policy::default(),
    }
}

fn name() -> SecretName {
    SecretName {
        namespace: "team".to_owned(),
        name: "admin".to_owned(),
    }
}

fn secret(labels: &[&str]) -> Secret {
    let mut secret = Secret::default();
    secret.metadata.name = Some("admin".to_owned());
    secret.metadata.namespace = Some("team".to_owned());
    let labels = labels
        .iter()
        .map(|it| ((*it).to_owned(), "true".to_owned()));
    secret.metadata.labels = Some(labels.collect());
    secret.data = Some([("other".to_owned(), ByteString(Vec::new()))].into());
    secret
}

fn entry(secret: Option<Option<Secret>>, trouble: Option<&str>) -> SecretEntry {
    SecretEntry {
        secret,
        trouble: trouble.map(str::to_owned),
        parsed: None,
    }
}

#[tokio::test]
async fn named_secret_becomes_member_if_trusted_or_open() {
    let provider = provider(None);
    for (labels, trusted, is_member, is_open) in [
        (&[][..], true, true, false),
        (&[][..], false, false, false),
        (&["there"][..], false, true, true),
        (&[names::OPEN_TO_DEPLOYMENTS_LABEL][..], false, true, true),
        (&["else"][..], false, false, false),
    ] {
        let reference = SecretReference { key: None, trusted };
        let entry = entry(Some(Some(secret(labels))), None);
        let (state, source) = provider.read(&name(), &reference, &entry);
        let expected = SecretState::Present {
            member: "s-admin".to_owned(),
            open: is_open,
        };
        assert_eq!(state, Some(expected), "{labels:?}");
        assert_eq!(source.is_some(), is_member, "{labels:?} {trusted}");
    }
}

#[tokio::test]
async fn unread_secret_is_unknown_and_last_read_stands() {
    let provider = provider(None);
    let reference = SecretReference {
        key: Some("admin.conf".to_owned()),
        trusted: true,
    };
    let read = |entry: &SecretEntry| provider.read(&name(), &reference, entry);
    let (state, source) = read(&SecretEntry::default());
    assert_eq!(state, None);
    assert_eq!(source.unwrap().access.unwrap_err().reason, reason::STARTING);
    let (state, source) = read(&entry(None, Some("no answer")));
    assert_eq!(state, Some(SecretState::Unread("no answer".to_owned())));
    assert_eq!(source.unwrap().access.unwrap_err().reason, reason::STARTING);
    let (state, source) = read(&entry(Some(None), None));
    assert_eq!((state, source), (Some(SecretState::Absent), None));
    let mut deleting = secret(&[]);
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH);
    deleting.metadata.deletion_timestamp = Some(now);
    let (state, _) = read(&entry(Some(Some(deleting)), None));
    assert_eq!(state, Some(SecretState::Absent));

    let later = entry(Some(Some(secret(&[]))), Some("no answer"));
    let source = read(&later).1.unwrap();
    assert_eq!(source.stale.unwrap().reason, reason::SOURCE_UNAVAILABLE);
    let fault = source.access.unwrap_err().message;
    assert!(
        fault.contains("team/admin") && fault.contains("\"admin.conf\""),
        "{fault}"
    );
}

#[tokio::test]
async fn every_secret_is_covered_until_names_are_known() {
    let other = SecretName {
        namespace: "team".to_owned(),
        name: "other".to_owned(),
    };
    assert!(provider(None).covers(&name().origin()));
    let references = Some(Arc::new([(name(), SecretReference::default())].into()));
    let provider = provider(references);
    assert!(provider.covers(&name().origin()));
    assert!(!provider.covers(&other.origin()));
}

#[tokio::test]
async fn secret_is_read_again_only_after_its_change() {
    let provider = provider(None);
    let reference = SecretReference {
        key: None,
        trusted: true,
    };
    let other = SecretName {
        name: "other".to_owned(),
        ..name()
    };
    let mut references: BTreeMap<_, _> = [name(), other.clone()]
        .map(|name| (name, reference.clone()))
        .into();
    let mut entries = BTreeMap::new();
    assert_eq!(provider.read_changed(&references, &mut entries), 2);
    assert_eq!(provider.read_changed(&references, &mut entries), 0);
    let entry = entries.get_mut(&name()).unwrap();
    entry.apply(Ok(Some(secret(&[]))));
    assert_eq!(provider.read_changed(&references, &mut entries), 1);
    let parsed = entries[&name()].parsed.as_ref().unwrap();
    assert!(matches!(parsed.state, Some(SecretState::Present { .. })));
    let entry = entries.get_mut(&name()).unwrap();
    entry.apply(Err("no answer".to_owned()));
    assert_eq!(provider.read_changed(&references, &mut entries), 1);
    references.get_mut(&other).unwrap().trusted = false;
    assert_eq!(provider.read_changed(&references, &mut entries), 1);
    references.remove(&other);
    assert_eq!(provider.read_changed(&references, &mut entries), 0);
    assert!(!entries.contains_key(&other));
}
