//! Providers, sources and listings for the tests of discovery.

use futures::FutureExt as _;
use krypton_types::conditions::reason;

use super::*;

/// A provider of one namespace, or of all. It never lists, because a test gives it its listing.
pub(super) struct FixedProvider(pub(super) Option<&'static str>);

impl Provider for FixedProvider {
    fn describe(&self) -> String {
        self.0.unwrap_or("given").to_owned()
    }

    fn covers(&self, origin: &Origin) -> bool {
        self.0.is_none() || origin.namespace.as_deref() == self.0
    }

    fn follow(self: Arc<Self>, _handle: ProviderHandle) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}

/// Returns the origin of a Secret.
pub(super) fn origin(namespace: &str, name: &str) -> Origin {
    Origin {
        kind: SourceKind::Secret,
        namespace: Some(namespace.to_owned()),
        name: name.to_owned(),
    }
}

/// Returns a source without a usable kubeconfig, whose annotation sets the member name.
pub(super) fn source(origin: Origin, member: &str) -> Source {
    Source {
        is_renamed: true,
        access: Err(Unresolved::new(reason::KUBECONFIG_INVALID, String::new())),
        ..Source::unread(origin, member.to_owned(), String::new())
    }
}

pub(super) fn listing(sources: impl IntoIterator<Item = Source>) -> Listing {
    let sources = sources.into_iter();
    let by_origin = sources.map(|source| (source.origin.clone(), Arc::new(source)));
    Listing {
        sources: Some(Arc::new(by_origin.collect())),
        ..Listing::default()
    }
}
