//! Cache of the last indexes, which avoids downloading an unchanged index again.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use krypton_runtime::off_thread;
use krypton_types::fingerprint::sha256_hex;
use parking_lot::Mutex;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, ETAG, HeaderMap, HeaderValue, IF_NONE_MATCH,
};
use reqwest::{StatusCode, Url};

use super::download::{GetRequest, RepositoryClient, append_path, read_body};
use super::error::ChartProblem;
use super::files::write_file;
use super::index;

/// Maximum number of cached indexes. A fleet has one repository, and each index takes at most 50 MiB on disk.
const MAX_INDEXES: usize = 4;
/// Maximum length of an `ETag` to send back.
const MAX_TAG_LENGTH: usize = 1024;
const ATTEMPT: &str = "reading index.yaml";

#[derive(Debug)]
pub(super) struct IndexStore {
    dir: PathBuf,
    cached: Mutex<Vec<CachedIndex>>,
}

#[derive(Clone, Debug)]
struct CachedIndex {
    url: Url,
    tag: HeaderValue,
    path: PathBuf,
    sha256: String,
}

impl IndexStore {
    pub(super) fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            cached: Mutex::default(),
        }
    }

    /// Returns the current index of `repo`.
    pub(super) async fn read(
        &self,
        client: &RepositoryClient,
        repo: &Url,
    ) -> Result<Vec<u8>, ChartProblem> {
        let url = append_path(repo, "index.yaml");
        let cached = match self.cached(&url) {
            Some(index) => load(index.clone()).await.map(|bytes| (index, bytes)),
            None => None,
        };
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        if let Some((index, _)) = &cached {
            headers.insert(IF_NONE_MATCH, index.tag.clone());
        }
        let request = GetRequest {
            attempt: ATTEMPT,
            url: url.clone(),
            headers,
            authorization: client.authorization(repo),
        };
        let (response, _) = client.send(&request).await?;
        if let (StatusCode::NOT_MODIFIED, Some((_, bytes))) = (response.status(), cached) {
            return Ok(bytes);
        }
        let tag = response.headers().get(ETAG).cloned();
        let encoding = response.headers().get(CONTENT_ENCODING);
        let is_gzip = encoding.is_some_and(|value| value == "gzip" || value == "x-gzip");
        let bytes = read_body(response, ATTEMPT, "index.yaml", index::LIMIT).await?;
        let bytes = if is_gzip { unpack(bytes).await? } else { bytes };
        match tag.filter(|tag| tag.len() <= MAX_TAG_LENGTH) {
            Some(tag) => Ok(self.store(url, tag, bytes).await),
            None => Ok(bytes),
        }
    }

    fn cached(&self, url: &Url) -> Option<CachedIndex> {
        let cached = self.cached.lock();
        cached.iter().find(|index| index.url == *url).cloned()
    }

    /// Stores an index and returns it. An error only causes another download.
    async fn store(&self, url: Url, tag: HeaderValue, bytes: Vec<u8>) -> Vec<u8> {
        let dir = self.dir.clone();
        let name = format!("index-{}.yaml", sha256_hex(url.as_str().as_bytes()));
        let path = dir.join(name);
        let (written, bytes) = {
            let path = path.clone();
            off_thread::run(move || {
                let written = write_file(&dir, &path, &bytes);
                let written = written.map(|()| sha256_hex(&bytes));
                (written, bytes)
            })
            .await
        };
        let evicted = {
            let mut cached = self.cached.lock();
            cached.retain(|index| index.url != url);
            let oldest = (cached.len() >= MAX_INDEXES).then(|| cached.remove(0));
            match written {
                Ok(sha256) => cached.push(CachedIndex {
                    url,
                    tag,
                    path,
                    sha256,
                }),
                Err(error) => tracing::debug!(%error, "an index was not kept"),
            }
            oldest
        };
        if let Some(index) = evicted
            && let Err(error) = off_thread::run(move || std::fs::remove_file(index.path)).await
        {
            tracing::debug!(%error, "failed to remove an old index");
        }
        bytes
    }
}

/// Returns the stored index if its file is unchanged.
async fn load(index: CachedIndex) -> Option<Vec<u8>> {
    off_thread::run(move || {
        let bytes = std::fs::read(&index.path).ok()?;
        (sha256_hex(&bytes) == index.sha256).then_some(bytes)
    })
    .await
}

async fn unpack(packed: Vec<u8>) -> Result<Vec<u8>, ChartProblem> {
    let unpacked = off_thread::run(move || {
        let mut bytes = Vec::new();
        let limited = MultiGzDecoder::new(packed.as_slice()).take(index::LIMIT + 1);
        io::copy(&mut io::BufReader::new(limited), &mut bytes).map(|_| bytes)
    })
    .await
    .map_err(ChartProblem::Unpacking)?;
    if unpacked.len() as u64 > index::LIMIT {
        return Err(ChartProblem::TooLarge {
            what: "index.yaml",
            limit: index::LIMIT,
        });
    }
    Ok(unpacked)
}
