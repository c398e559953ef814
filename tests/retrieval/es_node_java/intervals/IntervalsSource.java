package org.apache.lucene.search.intervals;

import java.io.IOException;
import java.util.Set;
import org.apache.lucene.index.LeafReaderContext;
import org.apache.lucene.index.Term;
import org.apache.lucene.search.MatchesIterator;

/** Declared so that the server links; the `intervals` query is not available in this jar. */
public abstract class IntervalsSource {
    public abstract IntervalIterator intervals(String field, LeafReaderContext context) throws IOException;

    public abstract MatchesIterator matches(String field, LeafReaderContext context, int document) throws IOException;

    public abstract void extractTerms(String field, Set<Term> terms);

    public abstract int minExtent();
}
